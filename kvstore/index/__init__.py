"""Index: the places of all chunks, and the decisions on loads, stores and eviction. Pure state, no I/O."""
