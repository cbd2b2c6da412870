"""Addresses that mean another place on each host, and the name of this host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from kvstore.protocol.hosts import is_on_each_host, this_host

PROGRAM = "from kvstore.protocol.hosts import this_host; print(this_host())"


@pytest.mark.parametrize(
    "url",
    [
        "kvs+ipc:///run/kvstore",
        "unix:///run/redis.sock",
        "unix://user@/run/redis.sock?db=1",
        "kvs://127.0.0.1:5566",
        "kvs://127.3.2.1:5566?connections=2",
        "kvs://[::1]:5566",
        "kvs://0.0.0.0:5566",
        "kvs://[::]:5566",
        "redis://LocalHost",
        "redis://user:p%40ss@localhost:6379/0",
        "redis-cluster://cache-1:6379,127.0.0.1:6379",
    ],
)
def test_addresses_that_each_host_takes_for_another_place(url: str) -> None:
    assert is_on_each_host(url)


@pytest.mark.parametrize(
    "url",
    [
        "kvs://10.0.0.5:5566",
        "kvs://[fd00::5]:5566",
        "kvs://localhost.example:5566",
        "redis://localhost:secret@cache:6379",
        "redis-sentinel://a:26379,b:26379/main",
        "s3://bucket/kv",
        "file:///mnt/shared",
        "pack:///data/system.kvpack",
        "kvs://[broken",
        "",
    ],
)
def test_addresses_that_mean_one_place(url: str) -> None:
    assert not is_on_each_host(url)


def elsewhere(*spaces: str) -> str:
    words = ["unshare", *spaces] if spaces else []
    return subprocess.check_output([*words, sys.executable, "-c", PROGRAM], text=True).strip()


def test_processes_side_by_side_are_on_one_host() -> None:
    assert elsewhere() == this_host() == this_host().strip()


@pytest.mark.parametrize("space", ["--net", "--mount"])
def test_a_container_is_a_host_of_its_own(space: str) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    assert elsewhere(space) != this_host()
