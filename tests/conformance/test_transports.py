"""Tests of every transport's contract."""

from __future__ import annotations

from kvstore.testing.transports import TransportConformance


class TestTcp(TransportConformance):
    """Transport with payload in messages."""
