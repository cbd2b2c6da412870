"""The key of other tensor-parallel sizes: its forms, and settings without a source to read from."""

from __future__ import annotations

import pytest

from kvstore.config import load_config
from kvstore.config.schema import StoreConfig
from kvstore.model.errors import ConfigError


def load(value: object) -> StoreConfig:
    return load_config({"kvstore.reshard_from": value}, environ={}).config


@pytest.mark.parametrize("value", [[1, 4], (1, 4), "1, 4", "1,4,"])
def test_several(value: object) -> None:
    assert load(value).reshard_from == (1, 4)


def test_one_and_none() -> None:
    assert load(2).reshard_from == load("2").reshard_from == (2,)
    assert load([]).reshard_from == load("").reshard_from == ()


@pytest.mark.parametrize(("text", "sizes"), [("2", (2,)), ("[1, 2]", (1, 2)), ("1, 2", (1, 2))])
def test_from_the_environment(text: str, sizes: tuple[int, ...]) -> None:
    assert load_config({}, environ={"KVSTORE_RESHARD_FROM": text}).config.reshard_from == sizes


@pytest.mark.parametrize("value", [0, [-1], [1, 1], [2000], "one", [1.5], [True], {"1": 2}])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="reshard_from"):
        load(value)


@pytest.mark.parametrize(
    ("other", "is_read"),
    [
        ({}, False),
        ({"local_disk": "/d", "max_local_disk_size": 1.0}, True),
        ({"remote_url": "redis://h"}, True),
        ({"peers": "kvs://a:1"}, True),
    ],
)
def test_without_a_place_to_read_from_a_warning_says_so(other: dict[str, object], *, is_read: bool) -> None:
    loaded = load_config({f"kvstore.{key}": value for key, value in {"reshard_from": 2, **other}.items()}, environ={})
    assert loaded.config.has_remote is is_read
    assert any("reshard_from: ignored" in line for line in loaded.warnings) is not is_read
