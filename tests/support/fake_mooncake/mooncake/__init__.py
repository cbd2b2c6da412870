"""Stand-in for the package of Mooncake, see ``store.py``."""
