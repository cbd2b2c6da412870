"""Load generators of others against real vLLM, with kvstore and without it."""
