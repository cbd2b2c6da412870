"""kvstore: the KV cache that outlives the GPU. See docs/ARCHITECTURE.md for the parts and their promises."""

__version__ = "0.1.0"
