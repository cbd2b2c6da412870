"""A server inside an engine's worker, which takes the KV of that engine only."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, TierError, TierSetupError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.harness import EVEN, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.server.tier import ServerTier
from kvstore.tools.cli import app

MINE = Namespace({"model": "files 0a", "dtype": "bf16", "shard": "pp 0/1 tp 0/2", "layout": EVEN.fingerprint})
POOL = EmbeddedOptions(64 * EVEN.slot_bytes + (1 << 20), "127.0.0.1", 0)


@contextmanager
def embedded(options: EmbeddedOptions = POOL) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(MINE, EVEN, options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def client(url: str, namespace: Namespace = MINE, layout: KVLayout = EVEN, **options: object) -> Iterator[ServerTier]:
    given = {"url": url, "timeout_s": 20.0, **options}
    tier = ServerTier.open(TierSetup(namespace, layout, UNBOUNDED_BYTES, given))
    try:
        yield tier
    finally:
        tier.close()


def at_tcp(server: EmbeddedServer) -> str:
    return f"kvs://127.0.0.1:{server.port}"


def holds(tier: ServerTier, number: int) -> bool:
    """Read a chunk, and compare its bytes."""
    ref, buffer = make_ref(number), make_buffer(EVEN.slot_bytes)
    (outcome,) = tier.get([Transfer(ref, buffer)])
    if outcome is Outcome.HIT:
        payload = make_payload(EVEN, ref)
        assert buffer[: len(payload)].tobytes() == payload
    return outcome is Outcome.HIT


def test_what_others_send_the_engine_reads_and_the_other_way_round() -> None:
    with embedded() as server, client(server.url) as own, client(at_tcp(server)) as other:
        assert other.put([make_transfer(EVEN, make_ref(1))]) == [Outcome.STORED]
        assert holds(own, 1)
        assert own.put([make_transfer(EVEN, make_ref(2))]) == [Outcome.STORED]
        assert holds(other, 2)


def test_everything_sent_is_taken_and_what_was_used_last_stays() -> None:
    """A policy that refuses chunks used once would lose a hand-over."""
    with embedded() as server, client(at_tcp(server)) as other:
        for number in range(500):
            assert other.put([make_transfer(EVEN, make_ref(number))]) == [Outcome.STORED]
        assert holds(other, 499)
        assert not holds(other, 0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "files 0b"}, "model"),
        ({"dtype": "fp8"}, "dtype"),
        ({"shard": "pp 0/1 tp 0/4", "layout": "another"}, "layout, shard"),
        ({"epoch": "00ff"}, "epoch"),
        ({"secret" * 50: "x"}, "fields not known here"),
    ],
)
def test_a_stranger_is_told_which_fields_differ_and_no_values(
    changed: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Namespace({**MINE.fields, **changed})
    with embedded() as server, client(server.url) as own, client(at_tcp(server), stranger) as other:
        with pytest.raises(
            TierSetupError, match=rf"belongs to an engine with incompatible KV: they differ in {named}$"
        ):
            other.check()
        with pytest.raises(TierSetupError):
            other.put([make_transfer(EVEN, make_ref(1))])
        assert not holds(own, 1)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    refused = f"refused an engine with incompatible KV: it differs in {named}"
    assert warnings == [f"{refused}; further messages suppressed for 60 s"]


def test_another_geometry_is_another_engine() -> None:
    other_layout = replace(EVEN, planes=2)
    with (
        embedded() as server,
        client(at_tcp(server), MINE, other_layout) as other,
        pytest.raises(TierSetupError, match="differ in layout"),
    ):
        other.check()


def test_new_weights_begin_anew_and_those_who_have_the_old_ones_are_refused() -> None:
    new = MINE.at_epoch("0123")
    with embedded() as server, client(server.url) as own, client(at_tcp(server)) as other:
        assert other.put([make_transfer(EVEN, make_ref(1))]) == [Outcome.STORED]
        server.enter(new)
        own.reset(new)
        assert not holds(own, 1)
        assert own.put([make_transfer(EVEN, make_ref(2))]) == [Outcome.STORED]
        assert holds(own, 2)
        with pytest.raises(TierSetupError, match="differ in epoch"):
            other.contains([make_ref(1)])
        with client(server.url) as late:  # a process of the engine that has not heard of it
            assert not holds(late, 1)
        with client(at_tcp(server), new) as follower:
            assert holds(follower, 2)


def test_strangers_without_a_key_do_not_get_in(tmp_path: Path) -> None:
    for name in ("server", "client", "stranger"):
        make_keys(tmp_path / name, name)
    options = replace(POOL, keys=read_pair(tmp_path / "server/server.key"), listed=read_list(tmp_path / "client"))
    with embedded(options) as server:
        with client(server.url) as own:
            own.check()
        for name in ("client", "stranger"):
            keys = {
                "client_key_file": tmp_path / name / f"{name}.key",
                "server_key_file": tmp_path / "server/server.pub",
            }
            timeout_s = 1.0 if name == "stranger" else 20.0
            with client(at_tcp(server), MINE, EVEN, timeout_s=timeout_s, **keys) as other:
                if name == "client":
                    other.check()
                else:
                    with pytest.raises(TierError, match="cannot be reached"):
                        other.check()


class TestRefusals:
    def test_other_hosts_need_keys(self) -> None:
        with pytest.raises(ConfigError, match="needs server_key_file and server_clients"):
            EmbeddedServer(MINE, EVEN, replace(POOL, host="0.0.0.0"))

    def test_a_host_that_is_none(self, tmp_path: Path) -> None:
        make_keys(tmp_path, "any")
        keys = {"keys": read_pair(tmp_path / "any.key"), "listed": read_list(tmp_path)}
        with pytest.raises(ConfigError, match=r"pd_peer_host 'nowhere.invalid' has no address"):
            EmbeddedServer(MINE, EVEN, replace(POOL, host="nowhere.invalid", **keys))  # type: ignore[arg-type]

    def test_memory_for_less_than_a_chunk(self) -> None:
        with pytest.raises(ConfigError, match="pd_buffer_size of 100 bytes does not hold one chunk"):
            EmbeddedServer(MINE, EVEN, replace(POOL, pool_bytes=100))

    def test_a_port_that_is_taken_leaves_nothing_behind(self) -> None:
        before = {thread.name for thread in threading.enumerate()}
        with embedded() as server, pytest.raises(ConfigError, match="cannot listen on"):
            EmbeddedServer(MINE, EVEN, replace(POOL, port=server.port))
        assert {thread.name for thread in threading.enumerate()} == before

    def test_a_thread_that_cannot_start_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with embedded() as server:
            port = server.port
        start = threading.Thread.start

        def refused(thread: threading.Thread) -> None:
            if thread.name == "kvstore-server":
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="new thread"):
                EmbeddedServer(MINE, EVEN, replace(POOL, port=port))
        assert list(tmp_path.iterdir()) == []
        with embedded(replace(POOL, port=port)):
            pass


def test_a_name_of_this_machine_is_listened_on() -> None:
    with embedded(replace(POOL, host="localhost")) as server, client(at_tcp(server)) as other:
        other.check()


def test_its_end_hangs_up_and_leaves_nothing_behind() -> None:
    before = {thread.name for thread in threading.enumerate()}
    server = EmbeddedServer(MINE, EVEN, POOL)
    folder = Path(server.url.removeprefix("kvs+ipc://"))
    assert folder.stat().st_mode & 0o777 == 0o700
    with client(server.url) as own, client(at_tcp(server), timeout_s=1.0) as other:
        own.check()
        other.check()
        server.close()
        server.close()
        for tier in (own, other):
            with pytest.raises(TierError):
                tier.contains([make_ref(1)])
    assert not folder.exists()
    assert {thread.name for thread in threading.enumerate()} == before


def test_the_next_one_sweeps_what_killed_ones_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, young = tmp_path / "kvstore-server-killed", tmp_path / "kvstore-server-young"
    for folder in (killed, young):
        folder.mkdir()
        (folder / "pool").touch()
    with embedded() as alive:
        living = Path(alive.url.removeprefix("kvs+ipc://"))
        for folder in (killed, living):
            os.utime(folder, (0, 0))
        with embedded():
            assert not killed.exists()
            assert young.exists()
            assert living.exists()


def test_operators_see_what_it_holds() -> None:
    with embedded() as server, client(server.url) as own:
        own.put([make_transfer(EVEN, make_ref(1))])
        result = CliRunner().invoke(app, ["stats", "--url", server.url, "--json"])
        assert result.exit_code == 0
        assert json.loads(result.output)["tiers"]["memory"]["chunks"] == 1
