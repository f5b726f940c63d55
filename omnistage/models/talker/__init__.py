"""The embedded talker: a small English voice that runs in stock vLLM and comes with the package."""
