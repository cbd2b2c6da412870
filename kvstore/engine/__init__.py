"""Cache engine: plans and moves of one process, put together behind ``CacheEngine``."""
