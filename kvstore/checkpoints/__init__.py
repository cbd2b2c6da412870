"""Checkpoints: the state that a model with several KV cache groups needs, with its chunks, to continue at a token."""
