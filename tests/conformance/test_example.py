"""The tier that docs/tiers.md shows keeps the contract, as its text stands there."""

from __future__ import annotations

from support import example_tier

TestSqliteTier = example_tier.load_test()
