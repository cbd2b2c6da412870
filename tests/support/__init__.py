"""Helpers shared by several tests. On the path as `support` (see `pythonpath` in pyproject.toml)."""
