"""Staging on a device whose copies come as late as they may: whoever does not wait for them gets wrong bytes.

What is launched beside the current stream is done only when somebody waits for it, on the host or on the current
stream; the current stream does everything at once. That is the worst that a GPU may do to a gather, and to a scatter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.engine import CacheEngine
from kvstore.keys import Namespace
from kvstore.options import EngineOptions
from kvstore.paged.base import BlockIds, ChunkBlocks, find_planes
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.staging import Staging
from kvstore.paged.streams import Streams, Way, Work
from kvstore.transfer.mover import as_block_ids

BLOCKS, TOKENS, CHUNKS, CHUNK_BLOCKS, LAYERS = 40, 4, 5, 4, 3


class LateStreams(Streams):
    """A queue for each way; a moment is a place in one of them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queues: dict[Way, list[Work | None]] = {way: [] for way in Way}
        self.launched: list[Way] = []

    def now(self) -> Any:
        return None

    def hold(self, moment: Any) -> None:
        self.reach(moment)

    def launch(self, way: Way, work: Work, after: Any) -> Any:
        self.launched.append(way)

        def in_order() -> None:
            self.reach(after)
            work()

        self.queues[way].append(in_order)
        return way, len(self.queues[way])

    def reach(self, moment: Any) -> None:
        if moment is None:
            return
        way, end = moment
        for place in range(end):
            work, self.queues[way][place] = self.queues[way][place], None
            if work is not None:
                work()

    def wait(self) -> None:
        for way, queue in self.queues.items():
            self.reach((way, len(queue)))

    def keep(self, memory: torch.Tensor) -> None:
        """Nothing is dropped here."""

    @property
    def pending(self) -> int:
        return sum(work is not None for queue in self.queues.values() for work in queue)


def caches(planes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, TOKENS, 6) if planes == 1 else (2, BLOCKS, TOKENS, 2, 3)
    return {
        f"layer.{layer}": torch.randint(-100, 100, shape, dtype=torch.int16, generator=generator)
        for layer in range(LAYERS)
    }


def late(layers: dict[str, torch.Tensor]) -> tuple[DevicePagedKV, LateStreams]:
    host = bind_paged_kv(layers, num_blocks=BLOCKS, block_tokens=TOKENS, chunk_tokens=CHUNK_BLOCKS * TOKENS)
    streams = LateStreams()
    found = [find_planes(name, cache, BLOCKS) for name, cache in layers.items()]
    return DevicePagedKV(found, host.layout, BLOCKS, streams=streams), streams


def chunks_of(paged: DevicePagedKV, order: np.ndarray[Any, Any]) -> list[ChunkBlocks]:
    payloads = np.zeros((CHUNKS, paged.layout.slot_bytes), np.uint8)
    parts = order[: CHUNKS * CHUNK_BLOCKS].reshape(CHUNKS, -1)
    return [paged.chunk(as_block_ids(ids), payload) for ids, payload in zip(parts, payloads, strict=True)]


def expected(layers: dict[str, torch.Tensor], planes: int, chunk: ChunkBlocks) -> bytes:
    ids = torch.from_numpy(chunk.block_ids)
    parts = [cache[ids] if planes == 1 else cache[:, ids] for cache in layers.values()]
    return b"".join(part.numpy().tobytes() for part in parts)


@pytest.mark.parametrize("planes", [1, 2])
def test_chunks_gathered_one_after_the_other_are_right_once_reached(planes: int) -> None:
    layers = caches(planes, 1)
    paged, streams = late(layers)
    chunks = chunks_of(paged, np.random.default_rng(0).permutation(BLOCKS))
    moments = [paged.gather(chunk.block_ids, chunk.payload) for chunk in chunks]
    assert streams.pending  # nobody has waited for the last ones
    wanted = [expected(layers, planes, chunk) for chunk in chunks]
    for cache in layers.values():
        cache.fill_(0)  # the model goes on, and writes the blocks again
    for chunk, moment, payload in zip(chunks, moments, wanted, strict=True):
        paged.reach(moment)
        assert chunk.payload[: len(payload)].tobytes() == payload


@pytest.mark.parametrize("planes", [1, 2])
def test_chunks_scattered_one_after_the_other_arrive(planes: int) -> None:
    layers = caches(planes, 1)
    (paged, _), (target, streams) = late(layers), late(empty := caches(planes, 2))
    sources = chunks_of(paged, np.random.default_rng(0).permutation(BLOCKS))
    for chunk in sources:
        paged.reach(paged.gather(chunk.block_ids, chunk.payload))
    places = chunks_of(target, np.random.default_rng(1).permutation(BLOCKS))
    for chunk, place in zip(sources, places, strict=True):
        target.scatter(place.block_ids, chunk.payload, CHUNK_BLOCKS, 0)
    for chunk, place in zip(sources, places, strict=True):  # kernels launched now see it, without a wait of the host
        assert expected(empty, planes, place) == expected(layers, planes, chunk)
    target.wait()
    assert not streams.pending


@pytest.mark.parametrize("planes", [1, 2])
def test_layers_are_right_after_wait(planes: int) -> None:
    layers = caches(planes, 1)
    (paged, streams), (target, _) = late(layers), late(empty := caches(planes, 2))
    sources = chunks_of(paged, np.random.default_rng(0).permutation(BLOCKS))
    wanted = [expected(layers, planes, chunk) for chunk in sources]
    for layer, cache in enumerate(layers.values()):
        paged.gather_layer(layer, sources)
        cache.fill_(0)
    assert streams.pending
    paged.wait()
    assert [chunk.payload[: len(one)].tobytes() for chunk, one in zip(sources, wanted, strict=True)] == wanted
    ids = chunks_of(target, np.random.default_rng(1).permutation(BLOCKS))
    places = [place._replace(payload=chunk.payload) for place, chunk in zip(ids, sources, strict=True)]
    for layer in range(LAYERS):
        target.scatter_layer(layer, places)
    assert [expected(empty, planes, place) for place in places] == wanted


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_engine_waits_for_what_it_needs(by_layer: bool) -> None:
    """A chunk is known once it is in its slot, and a slot is let go once it has been copied."""
    layers = caches(2, 1)
    paged, streams = late(layers)
    blocks = np.random.default_rng(0).permutation(BLOCKS)
    here, there = (ids[:, None] * TOKENS + np.arange(TOKENS) for ids in np.split(blocks, 2))
    before = {name: cache[:, torch.from_numpy(blocks[: BLOCKS // 2])].clone() for name, cache in layers.items()}
    tokens = list(range(here.size))
    with CacheEngine(paged, Namespace({"model": "toy"}), EngineOptions(1 << 20)) as engine:
        if by_layer:
            *_, stored = engine.store_layer(tokens, slot_mapping=here.reshape(-1))
        else:
            stored = engine.store(tokens, slot_mapping=here.reshape(-1))
        assert (stored, streams.pending) == (len(tokens), 0)
        for cache in layers.values():
            cache.fill_(0)
        if by_layer:
            *_, loaded = engine.retrieve_layer(tokens, slot_mapping=there.reshape(-1))
        else:
            loaded = engine.retrieve(tokens, slot_mapping=there.reshape(-1))
        assert loaded is not None
        assert loaded.all()
        assert not streams.pending
    for name, cache in layers.items():
        assert torch.equal(cache[:, torch.from_numpy(blocks[BLOCKS // 2 :])], before[name])


def test_ids_of_the_same_chunks_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, _ = late(caches(1, 1))
    sent: list[int] = []
    send = DevicePagedKV._ids

    def noted(paged: DevicePagedKV, ids: BlockIds) -> torch.Tensor:
        sent.append(len(ids))
        return send(paged, ids)

    monkeypatch.setattr(DevicePagedKV, "_ids", noted)
    chunks = chunks_of(paged, np.arange(BLOCKS))
    for layer in range(LAYERS):
        paged.gather_layer(layer, [chunk._replace() for chunk in chunks[:3]])
    assert sent == [12]
    paged.gather_layer(0, chunks[1:3])
    assert sent == [12, 8]


def test_a_buffer_is_not_filled_again_before_its_last_use_has_ended() -> None:
    streams = LateStreams()
    staging = Staging(8, streams)
    seen: list[int] = []
    for number in range(5):
        staging.carry_out(partial(torch.fill_, value=number), lambda buffer: seen.append(int(buffer[0])))
    assert seen == [0, 1, 2]  # two are on their way
    streams.wait()
    assert seen == [0, 1, 2, 3, 4]
