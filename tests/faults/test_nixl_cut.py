"""Tests of NIXL over UCX's TCP with a network that is cut during a hand-over."""

from __future__ import annotations

import subprocess
from contextlib import closing

import pytest
from support.channel_ends import NUM_CHUNKS, End, open_receiver
from support.network import runs_elsewhere
from support.redis_server import wait_for

pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)
pytestmark = pytest.mark.slow

ALL = str(["stored"] * NUM_CHUNKS)


def link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


@pytest.mark.sweep
def test_the_network_is_cut() -> None:
    """The sender gives up, the receiver forgets the partial chunks, and both work again once the network does."""
    if runs_elsewhere(f"{__file__}::test_the_network_is_cut", UCX_TLS="tcp"):
        return
    with closing(open_receiver("nixl")) as server:
        url = f"kvs://127.0.0.1:{server.port}"
        with End("sender", "nixl", url, 0) as sender:
            assert sender.says() == "ready"
            sender.go()
            assert sender.says() == "half"
            sender.go()
            assert sender.says().startswith(ALL)
            used = server.stats(30.0)["tiers"]["memory"]["used_bytes"]
            sender.go()
            assert sender.says() == "half"
            link("down")
            sender.go()
            assert sender.says().startswith("failed")
        link("up")
        wait_for(
            "what had come is forgotten",
            lambda: server.stats(30.0)["tiers"]["memory"]["used_bytes"] == used,
            timeout_s=90.0,
        )
        with End("sender", "nixl", url, 100) as another:
            assert another.says() == "ready"
            for _ in range(2):
                another.go()
            assert another.says() == "half"
            assert another.says().startswith(ALL)
