"""Tests of a cache server and clients on another host: real sockets between two network namespaces."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import serving_tcp
from support.network import OtherHost, other_host
from support.redis_server import wait_for

from kvstore.model.chunks import Outcome
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.options import TcpAddress
from kvstore.testing.harness import EVEN, MINE, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.server.tier import ServerTier

A, B = make_ref(1), make_ref(2)
TRIES = 2
CLIENT = """
import json, sys
from kvstore.model.errors import TierError
from kvstore.testing.harness import EVEN, MINE, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.server.tier import ServerTier

options, tries = json.loads(sys.argv[1]), int(sys.argv[2])
tier = ServerTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, options))
said = []
for _ in range(tries):
    try:
        said.append([tier.get([make_transfer(EVEN, make_ref(1))])[0].value,
                     tier.put([make_transfer(EVEN, make_ref(2))])[0].value])
    except TierError as error:
        said.append(str(error))
tier.close()
print(json.dumps(said))
"""


@pytest.fixture
def elsewhere() -> Iterator[OtherHost]:
    with other_host() as host:
        yield host


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("server", "stranger", "other_server"):
        make_keys(tmp_path / name, name)
    make_keys(tmp_path / "clients", "engine")
    return tmp_path


def with_keys(keys: Path, name: str, server: str = "server") -> dict[str, Any]:
    return {"client_key_file": str(keys / f"{name}.key"), "server_key_file": str(keys / f"{server}/{server}.pub")}


def test_only_who_is_listed_comes_in_from_another_network(
    elsewhere: OtherHost, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    locked: dict[str, Any] = {"keys": read_pair(keys / "server/server.key"), "listed": read_list(keys / "clients")}
    door = TcpAddress(elsewhere.near, 0)
    with caplog.at_level(logging.WARNING), serving_tcp(tcp=door, **locked) as server:

        def ask(**options: Any) -> list[Any]:
            given = {"url": server.url, "timeout_s": 1.0, **options}
            answers: list[Any] = json.loads(elsewhere.run_python(CLIENT, json.dumps(given), str(TRIES)))
            return answers

        setup = {"url": server.url, "timeout_s": 10.0, **with_keys(keys, "clients/engine")}
        tier = ServerTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, setup))
        assert tier.put([make_transfer(EVEN, A)]) == [Outcome.STORED]
        strangers: list[dict[str, Any]] = [
            {},
            with_keys(keys, "stranger/stranger"),
            with_keys(keys, "clients/engine", "other_server"),
        ]
        for stranger in strangers:
            for said in ask(**stranger):
                assert "cannot be reached" in said
        assert tier.contains([A, B]) == [True, False]
        assert ask(**with_keys(keys, "clients/engine"), timeout_s=10.0) == [["hit", "stored"]] * TRIES
        transfer = make_transfer(EVEN, B, version=1)
        assert tier.get([transfer]) == [Outcome.HIT]
        payload = make_payload(EVEN, B)
        assert transfer.buffer[: len(payload)].tobytes() == payload
        tier.close()
        locks = server.hub._client_keys
        assert locks is not None
        wait_for("every try was noticed", lambda: locks.refused >= TRIES and server.hub.num_strangers >= 2 * TRIES)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(f"from {elsewhere.far}: its key is not in server_clients" in line for line in lines) == 1
    assert sum("has no keys" in line for line in lines) == 1
