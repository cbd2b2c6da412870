"""Decisions of a warming run: prompts to compute, to offer again, and to report. Real vLLM: tests/e2e."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.diskwork import EVEN
from support.warm_engine import WarmEngine, refs_of

from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import KeyExtras
from kvstore.tools.warm.wanted import Sharing
from kvstore.tools.warm.warming import WarmReport, warm_with


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + n * 7) % 1000 for n in range(length)]


def test_what_is_stored_is_not_computed() -> None:
    engine: Any = WarmEngine()
    prompts = [prompt(n, 300) for n in range(4)]
    first = warm_with(engine, prompts[:2], Sharing())
    assert (first.prompts, first.chunks_stored, first.tokens_computed) == (2, 4, 600)
    assert first.bytes_stored == 2 * (EVEN.payload_bytes(8) + EVEN.payload_bytes(1))
    again = warm_with(engine, prompts, Sharing())
    assert (again.prompts, again.prompts_present, again.chunks_present, again.chunks_stored) == (4, 2, 4, 4)
    assert again.tokens_computed == 600
    assert again.is_complete
    assert len(engine.computed) == 4


def test_batches_keep_to_what_may_be_on_its_way() -> None:
    """With 8 chunks at once, a batch has 4 prompts of 2 chunks; a prompt with more chunks is alone."""
    engine: Any = WarmEngine()
    warm_with(engine, [*(prompt(n, 300) for n in range(9)), prompt(77, 1999)], Sharing())
    assert engine.batches == [4, 4, 1, 1]


def test_a_chunk_for_which_there_was_no_room_is_offered_again() -> None:
    engine: Any = WarmEngine()
    tokens = prompt(1, 600)
    engine.lost, engine.losses = {engine.refs(tokens)[1]}, 1
    engine.held.add(ChunkRef(bytes(16), 8))
    engine.lost.add(ChunkRef(bytes(16), 8))
    report = warm_with(engine, [tokens, prompt(2, 600)], Sharing())
    assert (report.prompts, report.chunks_failed, report.is_complete) == (2, 0, True)
    assert engine.computed == [600, 600, 600]


def test_a_chunk_that_cannot_be_stored() -> None:
    """It is given up after a few rounds, and the other prompts count."""
    engine: Any = WarmEngine()
    tokens = prompt(1, 600)
    engine.lost, engine.losses = {engine.refs(tokens)[1]}, 100
    report = warm_with(engine, [tokens, prompt(2, 600)], Sharing())
    assert (report.prompts, report.failed_prompts, report.chunks_failed) == (1, 1, 1)
    assert not report.is_complete
    assert len(engine.computed) <= 4


def test_shared_chunks_count_once() -> None:
    engine: Any = WarmEngine()
    head = prompt(5, 512)
    report = warm_with(engine, [head + prompt(n, 256) for n in range(3)], Sharing())
    assert report.chunks_stored == 2 + 3
    assert report.tokens == 3 * 768


def test_a_tail_that_a_longer_prompt_holds_is_stored() -> None:
    """This holds even if the longer one was first, and only its chunk was ever stored for the shorter one's end."""
    engine: Any = WarmEngine()
    engine.supersedes = True
    longer = prompt(1, 700)
    report = warm_with(engine, [longer[:300], longer], Sharing())
    assert (report.chunks_failed, report.prompts) == (0, 2)
    assert engine.computed == [300, 700]
    again = warm_with(engine, [longer[:400], longer[:300], longer], Sharing())
    assert (again.prompts_present, again.chunks_failed, again.is_complete) == (3, 0, True)
    assert engine.computed == [300, 700]


def test_salts_of_prompts_and_of_the_run() -> None:
    engine: Any = WarmEngine()
    values: list[object] = [{"prompt_token_ids": prompt(1, 256), "cache_salt": "own"}, prompt(1, 256)]
    warm_with(engine, values, Sharing(salt="common"))
    for salt in ("own", "common"):
        assert engine.stored(refs_of(EVEN, prompt(1, 256), KeyExtras(cache_salt=salt)), {}) == [True]


def test_paths_among_prompts(tmp_path: Path) -> None:
    """The files that they name are read as on the command line."""
    (tmp_path / "a.jsonl").write_text(f"{prompt(1, 256)}\n{prompt(2, 256)}\n[-1]\n", encoding="utf-8")
    engine: Any = WarmEngine()
    report = warm_with(engine, [tmp_path / "a.jsonl", prompt(3, 256)], Sharing())
    assert (report.prompts, [item.where for item in report.skipped]) == (3, [f"{tmp_path}/a.jsonl, line 3"])


def test_stopped_between_batches() -> None:
    engine: Any = WarmEngine()
    asked = iter([False, True])
    report = warm_with(engine, [prompt(n, 300) for n in range(9)], Sharing(), should_stop=lambda: next(asked))
    assert (report.interrupted, report.prompts, report.is_complete) == (True, 4, False)
    assert warm_with(engine, [prompt(n, 300) for n in range(9)], Sharing()).prompts_present == 4


def test_prompts_that_are_passed_by_and_told() -> None:
    engine: Any = WarmEngine()
    seen: list[WarmReport] = []
    report = warm_with(engine, [[], [1, 1000], prompt(1, 2001), prompt(1, 10)], Sharing(), tick=seen.append)
    assert [item.where for item in report.skipped] == ["prompt 1", "prompt 2", "prompt 3"]
    assert [item.why.split(":")[0] for item in report.skipped[1:]] == [
        "token id 1000 is not in the model's vocabulary of 1,000",
        "too long",
    ]
    assert report.prompts == 1, "less than a block: nothing to store, and nothing to complain about"
    assert engine.computed == []
    assert seen[-1] is report


@pytest.mark.parametrize("argument", ["prompts", "format"])
def test_wrong_usage(argument: str, tmp_path: Any, run: Any) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"x"\n', encoding="utf-8")
    wrong = {"prompts": ["--prompts", tmp_path / "none"], "format": ["--prompts", file, "--format", "csv"]}[argument]
    assert run("warm", "--model", tmp_path, *wrong).exit_code == 2
