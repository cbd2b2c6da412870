"""Every transport keeps the contract."""

from __future__ import annotations

from kvstore.testing.transports import TransportConformance


class TestTcp(TransportConformance):
    """Payload in messages."""
