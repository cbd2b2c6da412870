"""Execution of the catalog's plans: copies between paged KV cache, slots and slower tiers."""
