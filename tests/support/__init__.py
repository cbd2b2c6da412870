"""What several tests share. On the path as `support` (see `pythonpath` in pyproject.toml)."""
