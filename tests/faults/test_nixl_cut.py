"""NIXL over UCX's TCP, and a network that is cut in the middle of a hand-over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing

import pytest
from support.channel_ends import NUM_CHUNKS, End, open_receiver
from support.redis_server import wait_for

pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)
pytestmark = pytest.mark.slow

INSIDE = "KVSTORE_TEST_NETWORK"  # set where the network is the test's own
ALL = str(["stored"] * NUM_CHUNKS)


def in_a_network_of_its_own(test: str) -> None:
    """Run a test again, where a cut hurts nobody else."""
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and ip")
    inside = f"ip link set lo up && exec {sys.executable} -m pytest -q {test}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", inside],
        env={**os.environ, INSIDE: "1", "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def link(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def test_the_network_is_cut() -> None:
    """The sender gives up, the receiver forgets what had come, and with the network both are there again."""
    if INSIDE not in os.environ:
        in_a_network_of_its_own(f"{__file__}::test_the_network_is_cut")
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
