"""Protocol between the cache server and its clients. ``docs/FORMAT.md`` describes it."""
