"""What the cache server and its clients exchange. ``docs/FORMAT.md`` describes it."""
