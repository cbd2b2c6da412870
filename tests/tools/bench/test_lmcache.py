"""The comparison with LMCache, with another kvstore in LMCache's place."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from kvstore.engine.options import EngineOptions
from kvstore.tools.bench import lmcache
from kvstore.tools.bench.lmcache import Kvstore
from kvstore.tools.bench.load import Mark
from kvstore.tools.bench.report import BenchReport, bench_table
from kvstore.tools.bench.samples import BenchError
from kvstore.tools.bench.workbench import Workbench

POOL_BYTES = 2 * lmcache.GEOMETRY.chunk_bytes


@pytest.fixture
def workbench(monkeypatch: pytest.MonkeyPatch) -> Workbench:
    monkeypatch.setattr(lmcache, "HOLD_S", 0.0)
    made = Workbench(lmcache.GEOMETRY, 1, split=True)
    assert {cache.shape for cache in made.caches} == {(2, made.paged.num_blocks, 16, 8, 128)}, "as LMCache reads them"
    return made


def test_both_are_measured_and_shown(workbench: Workbench) -> None:
    ours, theirs = (Kvstore(workbench, EngineOptions(POOL_BYTES)) for _ in range(2))
    lines = lmcache.measure(ours, theirs, workbench, 2)
    for system in (ours, theirs):
        system.close()
    assert [line.subject for line in lines] == [*lmcache.SUBJECTS]
    assert [len(line.pairs) for line in lines] == [2] * 4
    assert all(sample > 0 for line in lines for pair in line.pairs for sample in pair)
    load = Mark.now().until(Mark.now())
    console = Console(width=120, record=True)
    console.print(bench_table(BenchReport(workbench.geometry, workbench.batch_bytes, 2, lines, load)))
    assert console.export_text().count("GB/s") == 6


def test_one_wrong_byte_ends_it(workbench: Workbench) -> None:
    slots = workbench.new_batch()
    block_tokens = workbench.geometry.block_tokens
    stored = [cache[:, slots[::block_tokens] // block_tokens] for cache in workbench.caches]
    blocks, _ = workbench.destination()
    for cache, kv in zip(workbench.caches, stored, strict=True):
        cache[:, blocks] = kv
    workbench.check(blocks)
    workbench.caches[7].view(torch.int16)[1, blocks[3], 2, 1, 0] ^= 1
    with pytest.raises(BenchError, match="layer 7"):
        workbench.check(blocks)


def test_what_is_not_found_ends_it(workbench: Workbench) -> None:
    workbench.new_batch()
    ours = Kvstore(workbench, EngineOptions(POOL_BYTES))
    with pytest.raises(BenchError, match="kvstore found 0 of 256 tokens"):
        lmcache.looked_up_s(workbench, ours)
    ours.close()
