"""The model's paged KV cache: its layers, its blocks, and the copies between them and slots."""
