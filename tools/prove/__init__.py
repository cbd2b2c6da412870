"""Proof, on a user's own model and machine, that vLLM answers the same with kvstore as without it."""
