"""A cache of several groups moves the given rows, and no others."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.late_device import LateDevice, LateStreams

from kvstore.model.chunks import ByteArray
from kvstore.model.errors import InvalidCallError, LayoutError
from kvstore.paged.base import BlockIds, ChunkBlocks
from kvstore.paged.binding import bind_groups, bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.grouped import GroupedPagedKV, row_of, rows_of
from kvstore.paged.planes import find_planes

NUM_BLOCKS = 10
CHUNK_TOKENS = 64
WIDTHS = (24, 40, 16)  # bytes of a page of each group's layers


def caches() -> list[dict[str, torch.Tensor]]:
    """Return two layers of each group, all bytes different within a layer."""
    fill = torch.Generator().manual_seed(0)
    return [
        {
            f"{group}.{layer}": torch.randint(1, 255, (NUM_BLOCKS, width), generator=fill, dtype=torch.uint8)
            for layer in range(2)
        }
        for group, width in enumerate(WIDTHS)
    ]


def grouped(layers: list[dict[str, torch.Tensor]]) -> GroupedPagedKV:
    """Return a cache whose first group keeps all tokens, and whose third has blocks twice as long."""
    groups = [
        bind_paged_kv(tensors, num_blocks=NUM_BLOCKS, block_tokens=tokens, chunk_tokens=CHUNK_TOKENS, reserved_blocks=1)
        for tensors, tokens in zip(layers, (16, 16, 32), strict=True)
    ]
    return bind_groups(groups, [0], block_tokens=32, chunk_tokens=CHUNK_TOKENS)


def ids(*rows: tuple[int, int]) -> BlockIds:
    return np.array([row_of(group, block) for group, block in rows], np.int64)


def expected(layers: list[dict[str, torch.Tensor]], *runs: tuple[int, list[int]]) -> bytes:
    """Return [group][layer][block][page], of runs of one group each."""
    return b"".join(tensor[blocks].numpy().tobytes() for group, blocks in runs for tensor in layers[group].values())


def gathered(paged: GroupedPagedKV, rows: BlockIds, num_blocks: int) -> ByteArray:
    payload = np.full(paged.layout.slot_bytes, 0xAB, np.uint8)
    paged.gather_chunks([ChunkBlocks(rows, payload, num_blocks, 0)])
    return payload


def test_the_layout_is_that_of_the_groups_that_keep_all_tokens() -> None:
    layout = grouped(caches()).layout
    assert (layout.block_tokens, layout.page_bytes, layout.planes) == (32, (48, 48), 1)
    assert grouped(caches()).block_bytes == (48, 80, 32)


def test_rows_of_any_groups_lie_one_group_after_the_other() -> None:
    layers = caches()
    paged = grouped(layers)
    payload = gathered(paged, ids((1, 3), (1, 7), (2, 5), (1, 2)), 3)
    content = expected(layers, (1, [3, 7]), (2, [5]), (1, [2]))
    assert payload[: len(content)].tobytes() == content
    end = paged.layout.payload_bytes(3)
    assert not payload[len(content) : end].any(), "nothing of another chunk is left in its last block"
    assert (payload[end:] == 0xAB).all()


def test_what_was_gathered_comes_back_to_other_blocks() -> None:
    layers, fresh = caches(), caches()
    source, target = grouped(layers), grouped(fresh)
    for tensors in fresh:
        for tensor in tensors.values():
            tensor.zero_()
    payload = gathered(source, ids((1, 3), (1, 7), (2, 5)), 4)
    target.scatter(ids((1, 8), (1, 9), (2, 1)), payload, 4, 0)
    for group, moves in ((1, {8: 3, 9: 7}), (2, {1: 5})):
        for name, tensor in fresh[group].items():
            for to, origin in moves.items():
                assert torch.equal(tensor[to], layers[group][name][origin])
                tensor[to] = 0
            assert not tensor.any(), "no other block is written"
    assert not any(tensor.any() for tensor in fresh[0].values())


def test_null_blocks_are_left_out_at_either_end() -> None:
    layers, fresh = caches(), caches()
    source, target = grouped(layers), grouped(fresh)
    payload = gathered(source, ids((1, 3), (1, 7), (1, 4), (2, 5)), 4)
    target.scatter(ids((1, 0), (1, 8), (1, 0), (2, 0)), payload, 4, 0)
    for name, tensor in fresh[1].items():
        assert torch.equal(tensor[8], layers[1][name][7])
        assert torch.equal(tensor[0], caches()[1][name][0])
    assert target.bytes_of(ids((1, 0), (1, 8), (1, 0), (2, 0))) == 80
    assert target.bytes_of(ids((0, 1), (2, 8))) == 80


def test_a_null_block_in_the_middle_is_refused() -> None:
    paged = grouped(caches())
    payload = np.zeros(paged.layout.slot_bytes, np.uint8)
    with pytest.raises(InvalidCallError, match="block id 0"):
        paged.scatter(ids((1, 3), (1, 0), (1, 4)), payload, 4, 0)
    with pytest.raises(InvalidCallError, match="block id 0"):
        paged.gather(ids((1, 0)), payload)
    with pytest.raises(InvalidCallError, match="block id 0"):
        paged.gather_on_device(ids((1, 0), (1, 3)), torch.from_numpy(payload))


def test_the_device_moves_the_same_bytes() -> None:
    layers, fresh = caches(), caches()
    rows = ids((1, 3), (1, 7), (2, 5))
    payload = torch.zeros(4096, dtype=torch.uint8)
    grouped(layers).gather_on_device(rows, payload)
    assert payload.numpy().tobytes().startswith(expected(layers, (1, [3, 7]), (2, [5])))
    grouped(fresh).scatter_on_device(ids((1, 8), (1, 9), (2, 1)), payload, 4, 0)
    assert torch.equal(fresh[2]["2.1"][1], layers[2]["2.1"][5])


def test_the_first_group_s_blocks_are_their_own_rows() -> None:
    blocks = np.array([1, 5], np.int64)
    assert (rows_of(0, blocks) == blocks).all()


def test_a_rank_without_layers_of_a_group_moves_the_others() -> None:
    layers = caches()
    bound = [
        None
        if group == 1
        else bind_paged_kv(layers[group], num_blocks=NUM_BLOCKS, block_tokens=16, chunk_tokens=CHUNK_TOKENS)
        for group in range(3)
    ]
    paged = bind_groups(bound, [0], block_tokens=32, chunk_tokens=CHUNK_TOKENS)
    assert paged.block_bytes == (48, 0, 32)
    payload = gathered(paged, ids((1, 3), (2, 5)), 1)
    assert payload[:32].tobytes() == expected(layers, (2, [5]))


def test_without_a_group_that_keeps_all_tokens_a_part_has_room_for_the_largest_block() -> None:
    bound = [
        bind_paged_kv(tensors, num_blocks=NUM_BLOCKS, block_tokens=16, chunk_tokens=CHUNK_TOKENS)
        for tensors in caches()
    ]
    assert bind_groups(bound, [], block_tokens=32, chunk_tokens=CHUNK_TOKENS).layout.block_bytes == 80
    with pytest.raises(LayoutError, match="nothing to store"):
        bind_groups([None], [], block_tokens=32, chunk_tokens=CHUNK_TOKENS)


def test_other_groups_make_another_fingerprint() -> None:
    layers = caches()
    two = [bind_paged_kv(layers[group], num_blocks=NUM_BLOCKS, block_tokens=16, chunk_tokens=64) for group in (0, 1)]
    one = [two[0], bind_paged_kv(layers[2], num_blocks=NUM_BLOCKS, block_tokens=16, chunk_tokens=64)]
    fingerprints = {
        bind_groups(bound, [0], block_tokens=32, chunk_tokens=64).layout.fingerprint for bound in (two, one, two[::-1])
    }
    assert len(fingerprints) == 3


def test_layers_are_not_moved_one_by_one() -> None:
    with pytest.raises(InvalidCallError, match="layer by layer"):
        grouped(caches()).gather_layers(range(1), [])


# On a device


def on_device(device: LateDevice, layers: list[dict[str, torch.Tensor]]) -> GroupedPagedKV:
    """Return a cache as vLLM has it: layers of the first two groups share memory, the third's are separate."""
    bound: list[DevicePagedKV] = []
    for tensors in (layers[0], layers[0], layers[2]):
        planes = [find_planes(name, tensor, NUM_BLOCKS) for name, tensor in tensors.items()]
        layout = bind_paged_kv(tensors, num_blocks=NUM_BLOCKS, block_tokens=16, chunk_tokens=CHUNK_TOKENS).layout
        streams, first = (None, bound[0]) if bound else (LateStreams(device), None)
        bound.append(DevicePagedKV(planes, layout, NUM_BLOCKS, 1, streams=streams, staging_bytes=4096, beside=first))
    return bind_groups(bound, [0], block_tokens=16, chunk_tokens=CHUNK_TOKENS)


def test_groups_in_the_same_memory_share_a_launch_and_so_do_chunks() -> None:
    device, layers = LateDevice(0), caches()
    paged = on_device(device, layers)
    chunks = [
        ChunkBlocks(ids((0, 3), (0, 7), (1, 5), (2, 2)), np.zeros(4096, np.uint8), 4, 0),
        ChunkBlocks(ids((1, 1), (1, 6), (2, 4)), np.zeros(4096, np.uint8), 4, 0),
        ChunkBlocks(ids((0, 9)), np.zeros(4096, np.uint8), 1, 0),
    ]
    device.counts.clear()
    events = paged.gather_chunks(chunks)
    gathers, blanks = 2, 1  # the first and the second chunk end within a block
    assert (device.counts["run"], device.counts["OUT"], device.counts["reach"]) == (gathers + blanks,) * 2 + (0,)
    for chunk, event, runs in zip(
        chunks, events, ([(0, [3, 7]), (0, [5]), (2, [2])], [(0, [1, 6]), (2, [4])], [(0, [9])]), strict=True
    ):
        paged.streams.reach(event)
        content = expected(layers, *runs)
        assert chunk.payload[: len(content)].tobytes() == content

    fresh = caches()
    for tensors in fresh:
        for tensor in tensors.values():
            tensor.zero_()
    target = on_device(device, fresh)
    device.run_all()
    device.counts.clear()
    target.scatter_chunks(
        [
            chunks[0]._replace(block_ids=ids((0, 0), (0, 8), (1, 4), (2, 1))),
            chunks[1]._replace(block_ids=ids((1, 2), (1, 3), (2, 0))),
            chunks[2]._replace(block_ids=ids((0, 0))),
        ]
    )
    assert (device.counts["run"], device.counts["IN"], device.counts["reach"]) == (2, 2, 0)
    device.run_all()
    for group, moves in ((0, {8: 7, 4: 5, 2: 1, 3: 6}), (2, {1: 2})):
        for name, tensor in fresh[group].items():
            for to, origin in moves.items():
                assert torch.equal(tensor[to], layers[group][name][origin])
                tensor[to] = 0
            assert not tensor.any(), "no other block is written"


def test_a_chunk_is_there_when_the_last_of_its_groups_is() -> None:
    device, layers = LateDevice(0, eagerness=0.0), caches()
    paged = on_device(device, layers)
    device.run_all()
    chunk = ChunkBlocks(ids((2, 2), (0, 3)), np.zeros(4096, np.uint8), 2, 0)
    (event,) = paged.gather_chunks([chunk])
    paged.streams.reach(event)
    content = expected(layers, (2, [2]), (0, [3]))
    assert chunk.payload[: len(content)].tobytes() == content


def test_the_rest_of_a_part_is_blanked_when_its_slot_has_been_read() -> None:
    """On a device a slot that is still scattered is gathered into, and the host would be ahead of both."""
    device, layers = LateDevice(0, eagerness=0.0), caches()
    paged, slot = on_device(device, layers), np.zeros(4096, np.uint8)
    paged.streams.reach(paged.gather_chunks([ChunkBlocks(ids((0, 3), (0, 7)), slot, 2, 0)])[0])
    (read,) = paged.scatter_chunks([ChunkBlocks(ids((0, 4), (0, 5)), slot, 2, 0)])
    paged.streams.hold(read)  # as of a slot that is claimed
    (end,) = paged.gather_chunks([ChunkBlocks(ids((2, 2)), slot, 2, 0)])
    paged.streams.reach(end)
    device.run_all()
    assert all(torch.equal(cache[[4, 5]], cache[[3, 7]]) for cache in layers[0].values())
    content = expected(layers, (2, [2]))
    assert slot[: len(content)].tobytes() == content
    assert not slot[len(content) : paged.layout.payload_bytes(2)].any()


def test_a_fence_comes_after_gathers_of_every_group() -> None:
    """This includes gathers of a background thread whose layers are elsewhere."""
    device, layers = LateDevice(0, eagerness=0.0), caches()
    paged = on_device(device, layers)
    beside = paged.for_thread()
    chunk = ChunkBlocks(ids((2, 2)), np.zeros(4096, np.uint8), 1, 0)
    device.run_all()
    wanted = expected(layers, (2, [2]))
    assert isinstance(beside.streams, LateStreams)
    device.stalled = [beside.streams.current]
    (event,) = beside.gather_chunks([chunk])
    paged.fence()
    for tensor in layers[2].values():
        device.current.launch(partial(tensor[2].fill_, 0))
    device.run_unstalled()
    device.stalled = []
    beside.streams.reach(event)
    assert chunk.payload[: len(wanted)].tobytes() == wanted
