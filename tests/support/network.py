"""Network namespaces: one for a test that cuts the network, and another host at the end of a cable."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

_INSIDE: Final = "KVSTORE_TEST_NETWORK"  # set inside the test's network
_PREFIX_BITS: Final = 30


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


@dataclass(frozen=True)
class OtherHost:
    """Names of both ends.

    Attributes:
        name: of the namespace.
        near: the address of this end of the cable.
        far: the address of the other end.
        cable: the name of this end.
    """

    name: str
    near: str
    far: str
    cable: str = ""

    @property
    def far_cable(self) -> str:
        """The name of the other end."""
        return self.cable.replace("kvn", "kvf")

    def words(self, command: Sequence[object], *, binds: Mapping[Path, Path] | None = None) -> list[str]:
        """Return the words for a ``Forker`` that run a module's ``main`` there; see ``support/there.py``."""
        places = {str(near): str(far) for near, far in (binds or {}).items()}
        return ["support.there", json.dumps([self.name, places]), *map(str, command)]

    def cut(self) -> None:
        """Pull the cable out."""
        subprocess.run(["ip", "link", "set", self.cable, "down"], check=True)

    def mend(self) -> None:
        """Put the cable in."""
        subprocess.run(["ip", "link", "set", self.cable, "up"], check=True)

    def run_python(self, code: str, *arguments: str) -> str:
        """Run a program there, and return its output."""
        tests = str(Path(__file__).parent.parent)
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make another host, and remove it at the end. The test is skipped where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command: apt-get install iproute2")
    token = secrets.token_hex(3)
    net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
    near, far = f"kvn{token}", f"kvf{token}"
    host = OtherHost(f"kvs-{token}", f"{net}.1", f"{net}.2", near)
    steps = [
        f"ip netns add {host.name}",
        f"ip link add {near} type veth peer name {far} netns {host.name}",
        f"ip address add {host.near}/{_PREFIX_BITS} dev {near}",
        f"ip link set {near} up",
        f"ip -n {host.name} address add {host.far}/{_PREFIX_BITS} dev {far}",
        f"ip -n {host.name} link set {far} up",
        f"ip -n {host.name} link set lo up",
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespace can be made here: {step}: {done.stderr.strip()}")
        yield host
    finally:
        for command in (f"ip link delete {near}", f"ip netns delete {host.name}"):
            subprocess.run(command.split(), capture_output=True, check=False)
