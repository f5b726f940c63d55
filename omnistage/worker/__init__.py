"""The part that lives in vLLM's worker processes: rows of hidden states for those who want them."""
