"""The mooncake tier, see ``tier.py``."""
