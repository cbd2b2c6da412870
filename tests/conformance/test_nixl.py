"""NIXL keeps the contract of a channel."""

from __future__ import annotations

import pytest

from kvstore.testing.channels import ChannelConformance

nixl = pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)


class TestNixl(ChannelConformance):
    """Through shared memory, or what else UCX chooses here."""

    channel = nixl.NixlChannel
