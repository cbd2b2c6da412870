"""Tests of real vLLM over an S3 server and a shared folder: restarts find all, engines share, outputs are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import wait_for
from support.runner import generated_elsewhere, staying_elsewhere
from support.s3_server import S3Server
from support.vllm_engine import (
    ONE_MODE_AND_SOAK,
    Completion,
    Engine,
    Prompt,
    assert_same_outputs,
    hits_again,
    is_all_cached,
    through_memory,
)

from kvstore.tiers.object.names import parse_place
from kvstore.tiers.object.reader import LogReader
from kvstore.tiers.object.tier import open_store
from kvstore.tiers.object.url import parse_target

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]
BUCKET = "engines"


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    server = S3Server(tmp_path / "s3").start()
    server.make_bucket(BUCKET)
    yield server
    server.kill()


@pytest.mark.sweep
def test_another_process_finds_all_in_s3_and_outlives_it(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], s3: S3Server
) -> None:
    """A restart on an empty machine loads what another process has stored; a store that hangs costs only time."""
    store = through_memory(s3.url(BUCKET))
    assert_same_outputs(plain_outputs, generated_elsewhere(tiny_model, store, prompts, two_processes=True))
    with Engine(tiny_model, store) as engine:
        shared = engine.generate(prompts)
        assert_same_outputs(plain_outputs, shared)
        assert is_all_cached(prompts, shared)
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()

        s3.freeze()
        engine.forget_local()
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        s3.thaw()
        engine.assert_idle()


def are_all_named(url: str) -> bool:
    """Tell if manifests name all chunks, which happens within seconds."""
    with closing(open_store(parse_target(url, {}))) as store:
        places = [place for listed in store.list("") if (place := parse_place(listed.name)) is not None]
        reader = LogReader(store, places[0].home)
        reader.read_all()
        return all(reader.catalog.holds([place.ref for place in places]))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_two_engines_share_while_both_run(
    tiny_model: Path,
    prompts: list[Prompt],
    plain_outputs: list[Completion],
    s3: S3Server,
    tmp_path: Path,
    kind: str,
) -> None:
    """The second finds what the first has stored; the first, which was there before, what the second stores."""
    url = s3.url(BUCKET) if kind == "s3" else f"file://{tmp_path}/kv"
    store = through_memory(url)
    half = len(prompts) // 2
    elsewhere = {"store": vars(store) | {"disk": None}, "rounds": ["cold"], "prompts": prompts}
    job = {"model": str(tiny_model), "max_tokens": 12, "engines": [elsewhere]}
    with Engine(tiny_model, store) as engine:
        assert_same_outputs(plain_outputs[:half], engine.generate(prompts[:half]))
        engine.settle()
        wait_for("manifests", lambda: are_all_named(url))
        with staying_elsewhere(job) as (outputs,):
            assert_same_outputs(plain_outputs, outputs)
            assert is_all_cached(prompts[:half], outputs[:half])
            assert_same_outputs(plain_outputs, hits_again(engine, prompts, asks={"kvstore.skip_save": True}))
        engine.assert_idle()


@ONE_MODE_AND_SOAK
def test_every_way_to_move_kv_through_a_folder(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], tmp_path: Path, mode: dict[str, Any]
) -> None:
    store = through_memory(f"file://{tmp_path}/shared/kv")
    (tmp_path / "shared").mkdir()
    store.extra.update(mode)
    with Engine(tiny_model, store) as engine:
        assert_same_outputs(plain_outputs, engine.generate(prompts))
        engine.settle()
        assert_same_outputs(plain_outputs, hits_again(engine, prompts))
        assert engine.moved.chunks_loaded_from_remote > 50
        engine.assert_idle()
