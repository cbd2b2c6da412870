"""Tests for tiers and policies of other packages, and for those of this one.

It has one suite that every tier and every wrapper of a tier must pass, a longer one for tiers that keep to a bound
(``BoundedTierConformance``), and one for policies (``policies.py``).

A tier's test is a class with hooks that open the tier and that read its storage without it::

    class TestMyTier(TierConformance):
        def open_tier(self, setup: TierSetup) -> Tier: ...
        def raw_read(self, ref: ChunkRef) -> bytes | None: ...
        def raw_used_bytes(self) -> int: ...

Needs pytest and hypothesis: ``pip install 'vllm-kvstore[testing]'``. ``docs/tiers.md`` has a whole example.
"""

from __future__ import annotations

from pkgutil import iter_modules

try:
    import hypothesis  # noqa: F401 - imported here, so that the error names the packages to install
    import pytest
except ImportError as error:
    raise ImportError(f"kvstore.testing needs {error.name}: pip install 'vllm-kvstore[testing]'") from error

pytest.register_assert_rewrite(*(f"{__name__}.{part.name}" for part in iter_modules(__path__)))

# Below the line above, or a failed assertion would not show its values.
from kvstore.testing.conformance import BoundedTierConformance, TierConformance  # noqa: E402
from kvstore.testing.harness import MINE, BoundedHarness, TierHarness  # noqa: E402
from kvstore.testing.lending import LendingTests  # noqa: E402
from kvstore.testing.machine import TierMachine  # noqa: E402
from kvstore.testing.policies import PolicyConformance, PolicyMachine  # noqa: E402

__all__ = [
    "MINE",
    "BoundedHarness",
    "BoundedTierConformance",
    "LendingTests",
    "PolicyConformance",
    "PolicyMachine",
    "TierConformance",
    "TierHarness",
    "TierMachine",
]
