"""NIXL keeps the contract of a channel, and leaves the process that imports it as it was."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from kvstore.errors import ChannelError
from kvstore.testing.channels import ChannelConformance

nixl = pytest.importorskip("kvstore.channels.nixl", reason="needs NIXL: the extra `nixl`", exc_type=ImportError)


class TestNixl(ChannelConformance):
    """Through shared memory, or what else UCX chooses here."""

    channel = nixl.NixlChannel


def test_what_others_log_is_not_touched() -> None:
    """NIXL silences errors of logging, and prints its own lines to stdout."""
    program = (
        "import logging, numpy; from kvstore.channels.nixl import NixlChannel; channel = NixlChannel();"
        "channel.register(numpy.zeros(4096, numpy.uint8)); channel.close(); print(logging.raiseExceptions)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_closing_does_not_wait_for_a_call_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl, "_CLOSE_WAIT_S", 0.01)
    channel = nixl.NixlChannel()
    channel.register(np.zeros(4096, np.uint8))
    with channel._lock, caplog.at_level(logging.WARNING):
        channel.close()
    assert "does not come back" in caplog.text
    with pytest.raises(ChannelError, match="closed"):
        channel.attach(channel.describe())
    channel.close()
    assert channel._agent is None
