"""Transfer carries out the catalog's plans: paged KV cache <-> slots <-> slower tiers."""
