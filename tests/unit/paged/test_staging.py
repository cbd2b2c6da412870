"""Staging on a device whose work is as late as allowed, where a missing wait gives wrong bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.late_device import LateDevice, LateStreams, late_paged

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import Namespace
from kvstore.paged.base import ChunkBlocks
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.places import Piece, PlaceRing, Places
from kvstore.paged.staging import Staging
from kvstore.paged.streams import Direction, Streams
from kvstore.transfer.mover import as_block_ids

BLOCKS, TOKENS, CHUNKS, CHUNK_BLOCKS, LAYERS = 40, 4, 5, 4, 3


def caches(planes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, TOKENS, 6) if planes == 1 else (2, BLOCKS, TOKENS, 2, 3)
    return {
        f"layer.{layer}": torch.randint(-100, 100, shape, dtype=torch.int16, generator=generator)
        for layer in range(LAYERS)
    }


def late(layers: dict[str, torch.Tensor], seed: int = 0, staging_bytes: int = 0) -> tuple[DevicePagedKV, LateDevice]:
    device = LateDevice(seed, eagerness=0.0)
    paged = late_paged(
        device,
        layers,
        num_blocks=BLOCKS,
        block_tokens=TOKENS,
        chunk_tokens=CHUNK_BLOCKS * TOKENS,
        staging_bytes=staging_bytes,
    )
    return paged, device


def overwrite(device: LateDevice, *layers: torch.Tensor) -> None:
    """Let the model continue, and write the blocks again."""
    for cache in layers:
        device.current.launch(partial(cache.fill_, 0))


def chunks_of(paged: DevicePagedKV, order: np.ndarray[Any, Any]) -> list[ChunkBlocks]:
    payloads = np.zeros((CHUNKS, paged.layout.slot_bytes), np.uint8)
    parts = order[: CHUNKS * CHUNK_BLOCKS].reshape(CHUNKS, -1)
    return [paged.chunk(as_block_ids(ids), payload) for ids, payload in zip(parts, payloads, strict=True)]


def expected(layers: dict[str, torch.Tensor], planes: int, chunk: ChunkBlocks) -> bytes:
    ids = torch.from_numpy(chunk.block_ids)
    parts = [cache[ids] if planes == 1 else cache[:, ids] for cache in layers.values()]
    return b"".join(part.numpy().tobytes() for part in parts)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("planes", [1, 2])
def test_chunks_pass_from_one_cache_to_another(planes: int, seed: int) -> None:
    """They pass whole and layer by layer, while the model of the first cache continues."""
    layers, empty = caches(planes, 1), caches(planes, 2)
    (paged, device), (target, other) = late(layers, seed), late(empty, seed, staging_bytes=1 << 14)
    sources = chunks_of(paged, np.random.default_rng(0).permutation(BLOCKS))
    wanted = [expected(layers, planes, chunk) for chunk in sources]
    events = paged.gather_chunks(sources[:2])
    for number, cache in enumerate(layers.values()):
        by_layer = paged.gather_layers(range(number, number + 1), sources[2:])
        overwrite(device, cache)
    for chunk, event, payload in zip(sources, [*events, *[by_layer] * 3], wanted, strict=True):
        paged.streams.reach(event)
        assert chunk.payload[: len(payload)].tobytes() == payload
    ids = chunks_of(target, np.random.default_rng(1).permutation(BLOCKS))
    places = [place._replace(payload=chunk.payload) for place, chunk in zip(ids, sources, strict=True)]
    target.scatter_chunks(places[:3])
    for number in range(LAYERS):
        target.scatter_layers(range(number, number + 1), places[3:])
    other.run_all()
    assert [expected(empty, planes, place) for place in places] == wanted


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_engine_waits_for_what_it_needs(by_layer: bool) -> None:
    """A chunk is known once it is in its slot, and a slot is released once it has been copied."""
    layers = caches(2, 1)
    paged, device = late(layers)
    blocks = np.random.default_rng(0).permutation(BLOCKS)
    here, there = (ids[:, None] * TOKENS + np.arange(TOKENS) for ids in np.split(blocks, 2))
    before = {name: cache[:, torch.from_numpy(blocks[: BLOCKS // 2])].clone() for name, cache in layers.items()}
    tokens = list(range(here.size))
    with CacheEngine(paged, Namespace({"model": "toy"}), EngineOptions(1 << 20)) as engine:
        if by_layer:
            *_, stored = engine.store_layer(tokens, slot_mapping=here.reshape(-1))
        else:
            stored = engine.store(tokens, slot_mapping=here.reshape(-1))
        assert stored == len(tokens)
        for cache in layers.values():
            cache.fill_(0)
        if by_layer:
            *_, loaded = engine.retrieve_layer(tokens, slot_mapping=there.reshape(-1))
        else:
            loaded = engine.retrieve(tokens, slot_mapping=there.reshape(-1))
        assert loaded is not None
        assert loaded.all()
        overwrite_slots(engine)
    device.run_all()
    for name, cache in layers.items():
        assert torch.equal(cache[:, torch.from_numpy(blocks[BLOCKS // 2 :])], before[name])


def overwrite_slots(engine: CacheEngine) -> None:
    """Overwrite slots that were given back, after the work that the device still does with them."""
    pool = engine._mover.cpu
    for slot in range(pool.num_slots):
        buffer = pool.claim(slot)
        pool.settle(slot)
        buffer[:] = 0xEE


def test_places_of_the_same_chunks_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, _ = late(caches(1, 1), staging_bytes=1 << 14)
    sent: list[int] = []
    write = PlaceRing.write

    def noted(ring: PlaceRing, pieces: Sequence[Sequence[Piece]]) -> Places:
        sent.append(sum(len(piece.block_ids) for launch in pieces for piece in launch))
        return write(ring, pieces)

    monkeypatch.setattr(PlaceRing, "write", noted)
    chunks = chunks_of(paged, np.arange(BLOCKS))
    for layer in range(LAYERS):
        paged.gather_layers(range(layer, layer + 1), [chunk._replace() for chunk in chunks[:3]])
    assert sent == [12]
    paged.gather_layers(range(1), chunks[1:3])
    assert sent == [12, 8]
    paged.gather_layers(range(1, 2), chunks[2:3])
    assert sent == [12, 8, 4]
    for layers in (range(2, 3), range(LAYERS)):  # loads and stores take turns
        paged.gather_layers(layers, chunks[:3])
        paged.scatter_layers(layers, chunks[1:3])
    assert sent == [12, 8, 4]
    paged.gather_layers(range(1), [*chunks[:2], chunks[3]])
    assert sent == [12, 8, 4, 12], "of other blocks behind the same"


@pytest.mark.slow
def test_what_the_ring_keeps_is_bounded() -> None:
    paged, device = late(caches(1, 1), staging_bytes=1 << 14)
    for number in range(5000):
        chunk = paged.chunk(as_block_ids([number % BLOCKS]), np.zeros(paged.layout.slot_bytes, np.uint8), CHUNK_BLOCKS)
        paged.gather_layers(range(1), [chunk])
    device.run_all()
    ring = paged._ring
    paged._ring._take(ring._size)
    assert not ring._kept
    assert not ring._oldest_first


def test_places_are_sent_again_when_the_device_has_lost_them() -> None:
    layers = caches(1, 1)
    paged, device = late(layers, staging_bytes=1 << 14)
    chunks = chunks_of(paged, np.arange(BLOCKS))[:1]
    wanted = expected(layers, 1, chunks[0])
    for layer in range(LAYERS):
        paged.streams.reach(paged.gather_layers(range(layer, layer + 1), chunks))
        device.run_all()
        paged._ring._on_device.fill_(-1)
        paged.restore()
    assert chunks[0].payload[: len(wanted)].tobytes() == wanted


def test_a_buffer_is_not_filled_again_before_its_last_use_has_ended() -> None:
    device = LateDevice(0, eagerness=0.0)
    streams = LateStreams(device)
    staging = Staging(8, streams)
    device.stalled = [streams.copying[Direction.OUT]]
    seen: list[int] = []
    for number in range(5):
        staging.carry_out(partial(torch.fill_, value=number), lambda buffer: seen.append(int(buffer[0])))
    with pytest.raises(AssertionError, match="wait for each other"):
        device.run_all()
    assert sorted(int(buffer[0]) for buffer in staging.buffers) == [0, 1, 2]  # on their way
    device.stalled = []
    device.run_all()
    assert seen == [0, 1, 2, 3, 4]


def test_a_buffer_is_filled_when_what_its_memory_was_used_for_is_done() -> None:
    """The work is of a copy stream, while the memory was lent to the current one."""
    device = LateDevice(0, eagerness=0.0)
    staging, seen = Staging(8, LateStreams(device)), list[int]()
    device.stalled = [device.current]
    staging.carry_in(partial(torch.fill_, value=7), lambda buffer: seen.append(int(buffer[0])))
    device.run_unstalled()
    device.stalled = []
    device.run_all()
    assert seen == [7]


# The ring of places


def test_places_are_written_again_when_their_last_use_has_ended() -> None:
    device = LateDevice(0, eagerness=0.0)
    ring = PlaceRing(4, streams := LateStreams(device))
    device.stalled = [device.current]
    found: list[list[int]] = []
    for number in range(8):
        places = ring.write([[Piece(as_block_ids([number] * 4), 4, 0)]])
        streams.run(partial(ring.send, places))
        streams.run(lambda places=places: found.append(places.on_device[0].tolist()))  # type: ignore[misc]
        places.last_use = streams.now()
    with pytest.raises(AssertionError, match="wait for each other"):
        ring.write([[Piece(as_block_ids([9]), 1, 0)]])  # the host waits: there is no room
    device.stalled = []
    for number in (1, 3, 2, 4, 1):
        ring.write([[Piece(as_block_ids([9] * number), number, 0)]])
    device.run_all()
    assert found == [[number] * 4 for number in range(8)]


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_never_lends_a_part_twice(seed: int) -> None:
    dice = random.Random(seed)
    ring = PlaceRing(5, Streams(torch.device("cpu")))
    held: list[Places] = []
    for number in range(200):
        pieces = [Piece(as_block_ids([number]), 7, 2)] * dice.randint(0, 5)
        held = [*held[-8:], ring.write([pieces])]
        ring.send(held[-1])
        for places, later in itertools.combinations([places for places in held if places in ring._oldest_first], 2):
            ends = [each.begin + each.on_host.numel() for each in (places, later)]
            assert ends[0] <= later.begin or ends[1] <= places.begin
        for places in held:
            if places in ring._oldest_first:
                assert len({tuple(place) for place in places.on_device[::2].T.tolist()}) <= 1
    with pytest.raises(InvalidCallError, match="cannot move 6 blocks at once, but only 5"):
        ring.write([[Piece(as_block_ids(range(4)), 4, 0)], [Piece(as_block_ids(range(2)), 2, 0)]])


def test_places_of_several_launches() -> None:
    """Blocks of chunks before are counted within a launch, and blocks of a chunk from the first that is moved."""
    ring = PlaceRing(12, Streams(torch.device("cpu")))
    whole, end, nothing = (
        Piece(as_block_ids([7, 3, 5]), 3, 0),
        Piece(as_block_ids([9, 2]), 4, 2),
        Piece(as_block_ids([]), 2, 1),
    )
    places = ring.write([[whole, nothing, end], [end, whole]])
    assert places.on_host.view(4, 10).tolist() == [
        [7, 3, 5, 9, 2, 9, 2, 7, 3, 5],
        [0, 0, 0, 5, 5, 0, 0, 4, 4, 4],
        [3, 3, 3, 4, 4, 4, 4, 3, 3, 3],
        [0, 1, 2, 2, 3, 2, 3, 0, 1, 2],
    ]
    assert [part.on_device.shape[1] for part in places.parts()] == [5, 5]


def test_places_are_sent_when_what_their_memory_was_used_for_is_done() -> None:
    device = LateDevice(0, eagerness=0.0)
    ring = PlaceRing(4, streams := LateStreams(device))
    places = ring.write([[Piece(as_block_ids([3]), 1, 0)]])
    device.stalled = [device.current]
    streams.launch(Direction.IN, partial(ring.send, places), None)
    device.run_unstalled()
    device.stalled = []
    device.run_all()
    assert places.on_device[:, 0].tolist() == [3, 0, 1, 0]


def test_a_ring_that_is_dropped_is_lent_again_when_places_have_been_sent() -> None:
    device = LateDevice(0, eagerness=0.0)
    ring = PlaceRing(4, streams := LateStreams(device))
    places = ring.write([[Piece(as_block_ids([3]), 1, 0)]])
    device.stalled = [streams.copying[Direction.IN]]
    streams.launch(Direction.IN, partial(ring.send, places), None)
    device.memory.drop(ring._on_device)
    other = streams.allocate(ring.device_bytes)
    streams.run(partial(other.fill_, 0xAA))
    device.run_unstalled()
    device.stalled = []
    device.run_all()
    assert (other == 0xAA).all()


def test_places_tell_where_blocks_lie() -> None:
    ring = PlaceRing(8, Streams(torch.device("cpu")))
    launches = [[Piece(as_block_ids([7, 5]), 4, 1), Piece(as_block_ids([3]), 2, 0)], [Piece(as_block_ids([6]), 1, 0)]]
    places = ring.write(launches)
    ring.send(places)
    first, second = (part.on_device.tolist() for part in places.parts())
    assert first == [[7, 5, 3], [0, 0, 4], [4, 4, 2], [1, 2, 0]]
    assert second == [[6], [0], [1], [0]]


def test_what_is_larger_than_a_buffer_is_refused() -> None:
    """A kernel would write behind the buffer; groups of layers share one, which must hold a piece of any of them."""
    first, _ = late(caches(1, 1))
    wide, _ = late({"layer.0": torch.ones((BLOCKS, TOKENS, 600), dtype=torch.int16)})
    beside = wide.beside(first)
    blocks = np.arange(1, 1 + wide.layout.blocks_per_chunk)
    payload = np.zeros(wide.layout.slot_bytes, np.uint8)
    assert payload.nbytes > first.layout.slot_bytes
    with pytest.raises(InvalidCallError, match="do not fit into a staging buffer"):
        beside.gather(blocks, payload)
    wide.gather(blocks, payload)
