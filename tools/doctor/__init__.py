"""``kvstore doctor``: whether this machine can do what a configuration asks."""
