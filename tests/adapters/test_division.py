"""Names of the chunks of engines of other tensor-parallel sizes, which the adapter knows without asking them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_objects import BLOCK, cache_config, hybrid, spec
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

from kvstore.adapters.vllm.glue import capabilities
from kvstore.adapters.vllm.glue.binding import paged_kv_of
from kvstore.adapters.vllm.glue.division import divisions_of
from kvstore.adapters.vllm.glue.namespace import namespace_of
from kvstore.adapters.vllm.glue.opening import _parts_sent_here
from kvstore.adapters.vllm.glue.options import engine_options, remote_options
from kvstore.config.schema import StoreConfig
from kvstore.model.heads import Division
from kvstore.model.keys import Namespace

pytestmark = pytest.mark.vllm

HEADS = 4
LAYERS = ["layer.0", "layer.1"]


class Rank:
    """One worker as vLLM configures it, with ``[B, H, N, C]`` tensors whose tokens or whose heads are outermost."""

    def __init__(self, rank: int, tp: int, pp: int = 1, *, heads_first: bool = True, total: int = HEADS) -> None:
        heads = max(1, total // tp)
        self.config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=lambda: {"hidden": 8}),
                dtype=torch.float32,
                quantization=None,
                get_head_size=lambda: 64,
                get_total_num_kv_heads=lambda: total,
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(
                rank=rank,
                world_size=tp * pp,
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
                data_parallel_rank=0,
                data_parallel_size=1,
            ),
            speculative_config=None,
        )
        self.cache = cache_config(KVCacheGroupSpec(LAYERS, replace(spec(), num_kv_heads=heads)))
        order = (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
        shape = [(8, heads, BLOCK, 128)[dim] for dim in order]
        self.caches = {name: torch.zeros(shape).permute(*order) for name in LAYERS}

    def store(self, *sizes: int) -> StoreConfig:
        return StoreConfig(
            chunk_size=4 * BLOCK,
            model_id="mine",
            reshard_from=sizes,
            local_disk="/cache",
            max_local_disk_size=1.0,
        )

    def paged(self) -> Any:
        return paged_kv_of(self.caches, self.cache, self.config, 4 * BLOCK)

    def namespace(self) -> Namespace:
        return namespace_of(self.config, self.cache, self.store(), self.paged())

    def divisions(self, *sizes: int) -> tuple[Division, ...]:
        return divisions_of(self.config, self.cache, self.store(*sizes), self.caches, self.paged())


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("own", "other"), [(1, 2), (2, 1), (4, 1), (1, 4), (8, 2), (2, 8), (4, 8)])
def test_parts_are_the_chunks_of_the_ranks_that_hold_our_heads(
    own: int, other: int, pp: int, *, heads_first: bool
) -> None:
    theirs = [Rank(rank, other, pp, heads_first=heads_first) for rank in range(other * pp)]
    for rank in range(own * pp):
        mine = Rank(rank, own, pp, heads_first=heads_first)
        (division,) = mine.divisions(other)
        stage = rank // own
        for part in division.parts:
            worker = theirs[part.rank]
            assert part.rank // other == stage
            assert part.namespace(mine.namespace()).fields == worker.namespace().fields
            assert part.layout == worker.paged().layout
            folder = Path("/cache") / f"rank-{part.rank}-of-{other * pp}" if other * pp > 1 else Path("/cache")
            assert part.folders == (folder,)
            assert engine_options(worker.config, worker.cache, worker.store()).local_disk == part.folders
            assert part.sends_to == part.rank * own // other
            assert part.sends_to <= rank


def test_ranks_that_hold_the_same_are_counted_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.31 on ranks may share a shard: eight ranks that hold four heads have four shards."""
    monkeypatch.setitem(capabilities.FOUND, capabilities.COUNTS_REPLICAS, True)
    mine = Rank(0, 1)
    group = replace(mine.cache.kv_cache_groups[0].kv_cache_spec, max_tp_shards=HEADS)
    mine.cache = cache_config(KVCacheGroupSpec(LAYERS, group))
    (division,) = mine.divisions(8)
    assert [part.rank for part in division.parts] == [0, 2, 4, 6]
    assert [part.shard for part in division.parts] == [f"pp 0/1 tp {shard}/4" for shard in range(4)]


def test_our_own_size_is_left_out() -> None:
    assert [division.size for division in Rank(0, 2).divisions(1, 2, 4)] == [1, 4]
    assert Rank(0, 2).divisions() == ()


def refused(rank: Rank, caplog: pytest.LogCaptureFixture, size: int = 2) -> str:
    paged = Rank(0, 1).paged()
    with caplog.at_level(logging.WARNING):
        assert divisions_of(rank.config, rank.cache, rank.store(size), rank.caches, paged) == ()
    (said,) = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return said


def test_what_forbids_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert "4 KV heads cannot be divided among 3 shards" in refused(Rank(0, 1), caplog, 3)
    scaled = Rank(0, 1)
    scaled.config.cache_config.cache_dtype = "int8_per_token_head"
    assert "kv_cache_dtype int8_per_token_head" in refused(scaled, caplog)
    measured = Rank(0, 1)
    measured.config.cache_config.calculate_kv_scales = True
    assert "scales" in refused(measured, caplog)
    drafted = Rank(0, 1)
    drafted.config.speculative_config = SimpleNamespace(model=None)
    assert "draft model" in refused(drafted, caplog)
    uneven = Rank(0, 1)
    uneven.config.model_config.get_total_num_kv_heads = lambda: 2 * HEADS
    assert "layers differ in their number of KV heads" in refused(uneven, caplog)
    nested = Rank(0, 1)
    nested.config.model_config.model_arch_config = SimpleNamespace(per_layer_overrides=[{}])
    assert "layers differ in their number of KV heads" in refused(nested, caplog)
    latent, grouped = Rank(0, 1), Rank(0, 1)
    mla = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.float32)
    latent.cache, grouped.cache = cache_config(KVCacheGroupSpec(LAYERS, mla)), hybrid()
    assert "MLA" in refused(latent, caplog)
    assert "windows or states" in refused(grouped, caplog)


def test_only_the_first_rank_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Rank(1, 2).divisions(3) == ()
    assert not caplog.records


def test_a_layout_that_is_not_reproduced_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(0, 1)
    other = Rank(0, 1, heads_first=False)
    with caplog.at_level(logging.WARNING):
        assert divisions_of(rank.config, rank.cache, rank.store(2), rank.caches, other.paged()) == ()
    assert "does not match its layout" in caplog.text


def test_without_a_remote_tier_nothing_is_sent() -> None:
    store = StoreConfig(local_disk="/cache", max_local_disk_size=1.0, reshard_from=(2,))
    options = remote_options(store)
    assert options is not None
    assert (options.url, options.peers, options.max_queue) == (None, (), 0)
    rank = Rank(0, 1)
    engine = engine_options(rank.config, rank.cache, rank.store(2), (rank.caches, rank.paged()))
    assert engine.remote is not None
    assert [division.size for division in engine.remote.divisions] == [2]


def test_only_parts_that_are_sent_to_a_worker_are_taken_by_its_server() -> None:
    """The first of two workers that need the same part takes it; it is read there, so all servers are known."""
    taken = []
    for number in range(2):
        rank = Rank(number, 2)
        store = rank.store(1, 4).model_copy(update={"enable_pd": True, "pd_peer_init_port": 7300})
        remote = engine_options(rank.config, rank.cache, store, (rank.caches, rank.paged())).remote
        assert remote is not None
        assert remote.servers == ("kvs://127.0.0.1:7300", "kvs://127.0.0.1:7301")
        taken.append([(part.rank, part.shard) for part in _parts_sent_here(remote)])
    assert taken == [
        [(0, "pp 0/1 tp 0/1"), (0, "pp 0/1 tp 0/4"), (1, "pp 0/1 tp 1/4")],
        [(2, "pp 0/1 tp 2/4"), (3, "pp 0/1 tp 3/4")],
    ]
