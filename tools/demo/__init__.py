"""Demonstration of a restarted vLLM that loads a long prompt's KV from disk instead of computing it."""
