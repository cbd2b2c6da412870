"""Tests of the contracts of the tier in docs/tiers.md and the policy in docs/policies.md, exactly as printed there."""

from __future__ import annotations

from support import example_tier

TestSqliteTier = example_tier.load_test()
TestMyPolicy = example_tier.load_policy_test()
