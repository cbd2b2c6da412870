"""Execution of the index's plans: copies between paged KV cache, slots and slower tiers."""
