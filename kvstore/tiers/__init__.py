"""Tiers: where chunks live outside the slab pool. ``base.py`` holds the contract."""
