"""Complete suites for tiers, one class each."""

from __future__ import annotations

from kvstore.testing.bounds import BoundsTests
from kvstore.testing.buffers import BufferTests
from kvstore.testing.contents import ContentTests, EndingTests
from kvstore.testing.damage import DamageTests
from kvstore.testing.lending import LendingRefusalTest
from kvstore.testing.lifetimes import BoundedLifetimeTests, LifetimeTests
from kvstore.testing.machine import MachineTests
from kvstore.testing.partial_reads import FrontTests, LayerTests
from kvstore.testing.restart import RestartTests
from kvstore.testing.threads import ThreadTests


class TierConformance(
    ContentTests,
    BufferTests,
    LayerTests,
    FrontTests,
    LendingRefusalTest,
    LifetimeTests,
    EndingTests,
    DamageTests,
    RestartTests,
    ThreadTests,
    MachineTests,
):
    """Tests of a tier. Subclass it under a name that begins with ``Test``, and fill in the hooks."""


class BoundedTierConformance(BoundedLifetimeTests, TierConformance, BoundsTests):
    """Tests of a ``BoundedTier``."""
