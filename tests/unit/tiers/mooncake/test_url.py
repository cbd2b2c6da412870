"""Meaning of Mooncake URLs, and errors in them."""

from __future__ import annotations

import pytest

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.tiers.mooncake.url import MooncakeTarget, parse_target

GOOD = {
    "mooncake://here": MooncakeTarget("here", 50051),
    "mooncake://here:7/": MooncakeTarget("here", 7),
    "mooncake://[::1]:7": MooncakeTarget("::1", 7),
    "mooncake://here?protocol=rdma&devices=mlx5_0,mlx5_1&segment_mib=64": MooncakeTarget(
        "here", 50051, protocol="rdma", devices="mlx5_0,mlx5_1", segment_mib=64
    ),
    "mooncakestore://here:7/?device=mlx5_0": MooncakeTarget("here", 7, devices="mlx5_0"),
}
BAD = {
    "http://here": "must begin with mooncake://",
    "mooncake://": "host of one master",
    "mooncake://one:1,two:2": "host of one master|wrong port",
    "mooncake://one,two": "host of one master",
    "mooncake://me:secret@here": "no logins",
    "mooncake://here/path": "nothing follows",
    "mooncake://here:99999": "wrong port",
    "mooncake://here?device=mlx5_0": "no option 'device'",
    "mooncake://here?connections=0": "a whole number of 1 at least",
}


@pytest.mark.parametrize("url", GOOD)
def test_urls(url: str) -> None:
    assert parse_target(url, {}) == GOOD[url]


@pytest.mark.parametrize("url", BAD)
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ConfigError, match=BAD[url]) as raised:
        parse_target(url, {})
    assert "secret" not in str(raised.value)


def test_options_take_precedence() -> None:
    assert parse_target("mooncake://here?timeout_s=3", {"timeout_s": 4.0, "ttl_s": None}).timeout_s == 4.0
    with pytest.raises(ConfigError, match="no option 'ttl_s'"):
        parse_target("mooncake://here", {"ttl_s": 60})


def test_lmcaches_configuration_is_read() -> None:
    """Its chunks are encrypted where keys are set, like those of an object store."""
    config = load_config({"lmcache.remote_url": "mooncakestore://here:7/?device=mlx5_0"}).config
    assert config.shared_url == "mooncakestore://here:7/?device=mlx5_0"
    assert config.encrypts_remote
