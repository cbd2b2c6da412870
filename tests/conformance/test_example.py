"""The tier of docs/tiers.md and the policy of docs/policies.md keep their contracts, as they stand there."""

from __future__ import annotations

from support import example_tier

TestSqliteTier = example_tier.load_test()
TestMyPolicy = example_tier.load_policy_test()
