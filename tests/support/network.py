"""Tests that cut the network run in a separate network namespace, where they disturb nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

import pytest

_INSIDE: Final = "KVSTORE_TEST_NETWORK"  # set inside the test's network


def runs_elsewhere(test: str, **environment: str) -> bool:
    """Run a test again in a new network namespace and wait for it; False inside it, where the test is to continue."""
    if _INSIDE in os.environ:
        return False
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and ip")
    inside = f"ip link set lo up && exec {sys.executable} -m pytest -q --soak {test}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", inside],
        env={**os.environ, _INSIDE: "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return True
