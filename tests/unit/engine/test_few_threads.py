"""An engine on a machine that has no further thread for it: it is slower, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cache_server import serving_tcp
from support.checks import check_idle
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S
from support.rig import CHUNK, Rig, tokens_of

from kvstore.engine.options import RemoteOptions

TOKENS = tokens_of(1, 3 * CHUNK)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_layers_are_scattered_where_no_thread_can_be_started(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.open() as engine:
        rig.store(engine, TOKENS)
        refuse_threads(monkeypatch, "kvstore-layers")
        blocks = rig.blocks(len(TOKENS))
        *_, loaded = engine.retrieve_layer(TOKENS, slot_mapping=rig.slot_mapping(blocks, len(TOKENS)))
        assert loaded is not None
        assert loaded.all()
        rig.check(TOKENS, blocks, 0, len(TOKENS))
        check_idle(engine)


def test_a_reset_needs_no_new_thread(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.open(local_disk=tmp_path) as engine:
        rig.store(engine, TOKENS)
        assert engine.flush(HANG_GUARD_S)
        refuse_threads(monkeypatch, "kvstore-disk-reset")
        engine.reset_cache()
        rig.version = 1
        assert rig.store(engine, TOKENS) == len(TOKENS)
        assert engine.flush(HANG_GUARD_S)
        assert rig.retrieve(engine, TOKENS) == len(TOKENS)
    with rig.open(local_disk=tmp_path) as engine:
        assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize("refused", ["kvstore-ask", "kvstore-read", "kvstore-write", "kvstore-copy"])
def test_calls_go_on_where_no_thread_can_be_started(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """No call raises, no slot stays in use, and what was not stored then is stored later."""
    with serving_tcp() as server:
        remote = RemoteOptions(server.url, {"timeout_s": 10.0}, lookup_timeout_s=10.0)
        with rig.open(local_disk=tmp_path, remote=remote) as engine:
            with monkeypatch.context() as patch:
                refuse_threads(patch, refused)
                rig.store(engine, TOKENS)
                rig.retrieve(engine, tokens_of(2, CHUNK))
                engine.flush(HANG_GUARD_S)
                check_idle(engine)
            assert rig.store(engine, tokens_of(2, CHUNK)) == CHUNK
            assert engine.flush(HANG_GUARD_S)
            assert rig.retrieve(engine, tokens_of(2, CHUNK)) == CHUNK
