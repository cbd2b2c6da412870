"""The demonstration: a restarted vLLM answers a long prompt from disk instead of computing it."""
