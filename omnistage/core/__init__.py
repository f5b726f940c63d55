"""The part that lives in vLLM's EngineCore process: scheduler, step collector, output adapter."""
