"""Tests of the redis tier with codecs: fewer parts, nothing left behind, and no chunk of another codec."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.diskwork import MINE, make_slot
from support.redis_server import ACL_USER, RedisServer, running
from support.schedules import schedules

from kvstore.format import chunkfile
from kvstore.memory.scratch import SCRATCH_BUFFERS, Scratch
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import ConfigError, TierError
from kvstore.model.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup, Transfer
from kvstore.tiers.redis.chunk import PART_BYTES, WRITE_ID_BYTES
from kvstore.tiers.redis.tier import RedisTier

LAYOUT = KVLayout((131072,) * 8, 1, 16, 64, element="bf16", page_axes=(4, 16, 1024))  # 4 MiB: five parts
DEEP = KVLayout((2048,) * 150, 1, 16, 64, element="bf16")  # needs a longer header with a codec than without
CODECS = ["lz4", "split", "int8"]
HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    one = RedisServer(tmp_path_factory.mktemp("redis"))
    with running(one):
        yield one


@pytest.fixture
def admin(server: RedisServer) -> Any:
    client = server.admin()
    client.flushall()
    return client


@pytest.fixture
def url(server: RedisServer, admin: Any) -> str:
    return f"redis://127.0.0.1:{server.port}"


def open_redis(url: str, codec: str, layout: KVLayout = LAYOUT) -> RedisTier:
    tier = open_tier("redis", TierSetup(MINE, layout, UNBOUNDED_BYTES, {"url": url, "codec": codec}))
    assert isinstance(tier, RedisTier)
    return tier


def make_ref(number: int, num_blocks: int = 4) -> ChunkRef:
    return ChunkRef(number.to_bytes(2, "little") * 8, num_blocks)


def payload_of(ref: ChunkRef, version: int, layout: KVLayout = LAYOUT) -> ByteArray:
    """Return KV-like bfloat16 with a layer of zeros (version 0), incompressible bytes (1), or zeros (2)."""
    dice = np.random.default_rng([version, *ref.prefix_key])
    size_bytes = layout.payload_bytes(ref.num_blocks)
    if version:
        return dice.integers(0, 256, size_bytes, np.uint8) * np.uint8(version == 1)
    values = torch.from_numpy(dice.standard_normal(size_bytes // 2, dtype=np.float32))
    payload = values.to(torch.bfloat16).view(torch.uint8).numpy()
    payload[slice(*layout.layer_range(3, ref.num_blocks))] = 0
    return payload


def put(tier: RedisTier, *refs: ChunkRef, version: int = 0, layout: KVLayout = LAYOUT) -> list[Outcome]:
    transfers = [Transfer(ref, make_slot(layout)) for ref in refs]
    for ref, slot, *_ in transfers:
        slot[: layout.payload_bytes(ref.num_blocks)] = payload_of(ref, version, layout)
    return tier.put(transfers)


def get(tier: RedisTier, ref: ChunkRef, version: int = 0, layout: KVLayout = LAYOUT, *, lossy: bool = False) -> Outcome:
    """Read a chunk; a hit must have the right bytes, or nearly the same values if the codec is lossy."""
    slot = make_slot(layout)
    (outcome,) = tier.get([Transfer(ref, slot)])
    if outcome is HIT:
        found, payload = slot[: layout.payload_bytes(ref.num_blocks)], payload_of(ref, version, layout)
        if lossy:
            values, expected = (torch.from_numpy(a.copy()).view(torch.bfloat16).float() for a in (found, payload))
            assert (values - expected).abs().max() <= expected.abs().max() / 64
        else:
            assert np.array_equal(found, payload)
    return outcome


def lengths(admin: Any, ref: ChunkRef | None = None) -> dict[bytes, int]:
    """Return the lengths of all values of a chunk, or of all chunks, by the ends of their keys."""
    which = f"{ref.prefix_key.hex()}:{ref.num_blocks}}}:*" if ref else "*"
    keys = [key for key in admin.scan_iter(f"kvs:*:{which}", 1000) if not key.endswith(b":epoch")]
    return {key.partition(b"}:")[2] if ref else key: admin.strlen(key) for key in keys}


@pytest.mark.parametrize("codec", CODECS)
def test_values_have_the_sizes_that_are_counted(url: str, admin: Any, codec: str) -> None:
    tier = open_redis(url, codec)
    refs = [make_ref(number, 1 + number % 4) for number in range(6)]
    assert put(tier, *refs) == [STORED] * 6
    assert [get(tier, ref, lossy=codec == "int8") for ref in refs] == [HIT] * 6
    sizes = {ref: sum(lengths(admin, ref).values()) for ref in refs}
    assert sum(sizes.values()) == sum(lengths(admin).values())
    assert tier.counters.bytes_written == tier.counters.bytes_read == sum(sizes.values())
    assert all(size < LAYOUT.payload_bytes(ref.num_blocks) for ref, size in sizes.items())
    tier.close()
    again = open_redis(url, codec)
    again.remove(refs[:3])
    assert sum(lengths(admin).values()) == sum(sizes[ref] for ref in refs[3:])
    again.close()


@pytest.mark.parametrize("codec", CODECS)
def test_a_commit_says_what_is_in_the_parts(url: str, admin: Any, codec: str) -> None:
    tier = open_redis(url, codec)
    put(tier, make_ref(1))
    stem = next(iter(admin.scan_iter("kvs:*}:c"))).removesuffix(b"c")
    commit = admin.get(stem + b"c")
    header_bytes = chunkfile.header_bytes(LAYOUT, codec)
    parsed = chunkfile.parse_encoding(LAYOUT, 4, commit[WRITE_ID_BYTES:].ljust(header_bytes), codec)
    assert isinstance(parsed, tuple)
    assert parsed[0] is not None
    data = b""
    for number in range(len(lengths(admin)) - 1):
        value = admin.get(stem + b"%d" % number)
        assert value[:WRITE_ID_BYTES] == commit[:WRITE_ID_BYTES]
        data += value[WRITE_ID_BYTES:]
    assert len(data) == parsed[0].total_bytes
    assert len(lengths(admin)) == 1 + -(-len(data) // PART_BYTES)
    tier.close()


def test_fewer_parts_take_the_place_of_more_and_more_that_of_fewer(url: str, admin: Any) -> None:
    tier, ref = open_redis(url, "lz4"), make_ref(1)
    parts = {0: 4, 1: 5, 2: 1}  # a layer of zeros; as it is; all zeros
    for version in (1, 0, 2, 1, 2, 0, 1):
        written_before = tier.counters.bytes_written
        assert put(tier, ref, version=version) == [STORED]
        assert set(lengths(admin, ref)) == {b"c", *(b"%d" % number for number in range(parts[version]))}
        written_bytes = tier.counters.bytes_written - written_before
        assert written_bytes == sum(lengths(admin).values())
        assert get(tier, ref, version) is HIT
    tier.remove([ref])
    assert lengths(admin) == {}
    tier.close()


@pytest.mark.parametrize("codec", CODECS)
def test_what_does_not_shrink_is_stored_as_without_a_codec(url: str, admin: Any, codec: str) -> None:
    layout = KVLayout((65536,) * 3, 1, 16, 64, element="bf16", page_axes=(4, 16, 512))
    ref = make_ref(1)
    tiers = {name: open_redis(url, name, layout) for name in ("none", codec)}
    slot = make_slot(layout)
    slot[:] = np.random.default_rng(1).integers(0, 256, len(slot), np.uint8)
    slot.view(np.uint16)[::7] = 0x7F80  # infinities, which int8 leaves as they are
    outcomes, sizes = set(), set()
    for name in ("none", codec):
        assert tiers[name].put([Transfer(ref, slot)]) == [STORED]
        sizes.add(sum(lengths(admin, ref).values()))
        assert tiers[name].counters.bytes_written == sum(lengths(admin, ref).values())
        for tier in tiers.values():
            outcomes.add(tier.get([Transfer(ref, make_slot(layout))])[0])
    if codec != "split":  # which compresses even these
        assert outcomes == {HIT}
        assert sizes == {tiers["none"].counters.bytes_written}
    for tier in tiers.values():
        tier.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", [LAYOUT, DEEP], ids=["parts", "deep"])
def test_chunks_without_a_codec_are_read_with_any(url: str, admin: Any, codec: str, layout: KVLayout) -> None:
    if codec == "int8" and layout.page_axes is None:
        pytest.skip("int8 needs channels")
    plain = open_redis(url, "none", layout)
    put(plain, make_ref(1), make_ref(2, 1), layout=layout)
    tier = open_redis(url, codec, layout)
    assert get(tier, make_ref(1), layout=layout) is get(tier, make_ref(2, 1), layout=layout) is HIT
    assert put(tier, make_ref(3), layout=layout) == [STORED]
    assert get(tier, make_ref(3), layout=layout, lossy=codec == "int8") is HIT
    assert tier.counters.bytes_read == sum(lengths(admin).values())
    tier.remove([make_ref(1), make_ref(2, 1), make_ref(3)])
    assert lengths(admin) == {}
    tier.close()
    plain.close()


@pytest.mark.parametrize(
    ("writer", "reader"), [("int8", "split"), ("split", "int8"), ("lz4", "none"), ("int8", "none"), ("split", "lz4")]
)
def test_chunks_of_another_codec_are_misses_and_go(url: str, admin: Any, writer: str, reader: str) -> None:
    tier = open_redis(url, writer)
    refs = [make_ref(1), make_ref(2, 1), make_ref(3)]
    put(tier, *refs)
    tier.close()
    tier = open_redis(url, reader)
    assert [get(tier, ref) for ref in refs[:2]] == [MISS, MISS]
    assert set(lengths(admin)) == {key for key in lengths(admin) if refs[2].prefix_key.hex().encode() in key}
    assert put(tier, *refs) == [STORED] * 3
    assert tier.counters.bytes_written == sum(lengths(admin).values())
    assert tier.counters.corrupt == 0
    tier.close()


@pytest.mark.parametrize("codec", ["lz4", "split"])
def test_damage_is_found_in_every_value(url: str, admin: Any, codec: str) -> None:
    tier, ref = open_redis(url, codec), make_ref(1)
    put(tier, ref)
    for purpose in sorted(lengths(admin, ref)):
        assert put(tier, ref) == [STORED]
        key = next(iter(admin.scan_iter("kvs:*}:" + purpose.decode())))
        value = bytearray(admin.get(key))
        value[-20] ^= 1
        admin.set(key, bytes(value))
        assert get(tier, ref) is Outcome.CORRUPT
        assert lengths(admin) == {}
        assert put(tier, ref) == [STORED]
        key = next(iter(admin.scan_iter("kvs:*}:" + purpose.decode())))
        admin.delete(key)
        assert get(tier, ref) is MISS
        assert lengths(admin) == {}
        assert get(tier, ref) is MISS
        put(tier, ref)
    tier.close()


def test_replaced_while_it_is_read(url: str, admin: Any) -> None:
    """A chunk replaced by more and by fewer parts is always read as one whole version, or missed after many looks."""
    tier, ref = open_redis(url, "lz4"), make_ref(1)
    put(tier, ref)
    payloads = [payload_of(ref, version) for version in range(3)]
    is_over = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        slot = make_slot(LAYOUT)
        while not is_over.is_set():
            (outcome,) = tier.get([Transfer(ref, slot)])
            found = slot[: len(payloads[0])]
            if outcome is not MISS and not (outcome is HIT and any(np.array_equal(found, p) for p in payloads)):
                wrong.append(outcome)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        assert put(tier, ref, version=number % 3) == [STORED]
    is_over.set()
    for reader in readers:
        reader.join(60)
    assert wrong == []
    assert set(lengths(admin, ref)) == {b"c", b"0"}, "the last one is all zeros"
    assert len(lengths(admin)) == 2
    assert tier.counters.hits > 0
    tier.close()


def test_a_user_with_the_documented_rights(server: RedisServer, url: str, admin: Any) -> None:
    """The documented rights suffice for all calls of a tier."""
    words = ACL_USER.split()[1:]
    admin.acl_setuser("kvstore", reset=True)
    admin.execute_command("ACL", "SETUSER", *words)
    tier = open_redis(f"redis://kvstore:s3cret@127.0.0.1:{server.port}", "split")
    put(tier, make_ref(1), make_ref(2))
    assert get(tier, make_ref(1)) is HIT
    tier.remove([make_ref(1)])
    assert tier.contains([make_ref(1), make_ref(2)]) == [False, True]
    tier.clear()
    assert lengths(admin) == {}
    tier.close()
    admin.acl_deluser("kvstore")


def test_a_codec_that_cannot_work_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match="packed or mixed data"):
        open_redis(url, "split", KVLayout((4096,), 1, 16, 64))
    with pytest.raises(ConfigError, match="did you mean 'split'"):
        open_redis(url, "splitt")
    with pytest.raises(ConfigError, match="'codec' of the redis tier is a name, not 3"):
        open_tier("redis", TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": url, "codec": 3}))


def test_who_finds_all_buffers_in_use_does_not_wait_for_ever() -> None:
    scratch = Scratch(4096, timeout_s=0.05)
    borrowed = [scratch.borrowed() for _ in range(SCRATCH_BUFFERS)]
    buffers = [one.__enter__() for one in borrowed]
    assert len({buffer.ctypes.data for buffer in buffers}) == SCRATCH_BUFFERS
    with pytest.raises(TierError, match="all 4 buffers of the codec are in use"), scratch.borrowed():
        pass
    borrowed[0].__exit__(None, None, None)
    with scratch.borrowed() as again:
        assert again is buffers[0]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "remove", "restart", "clear"]),
        st.integers(0, 5),
        st.sampled_from([1, 4]),
        st.integers(0, 2),
    ),
    max_size=25,
)


@schedules()
@given(actions=ACTIONS, codec=st.sampled_from(["lz4", "split"]))
def test_nothing_is_left_in_any_order(
    url: str,
    admin: Any,
    actions: list[tuple[str, int, int, int]],
    codec: str,
) -> None:
    admin.flushall()
    tier = open_redis(url, codec)
    held: dict[ChunkRef, tuple[int, int]] = {}  # the version, and the bytes
    for action, number, blocks, version in actions:
        ref = make_ref(number, blocks)
        if action == "put":
            before = tier.counters.bytes_written
            assert put(tier, ref, version=version) == [STORED]
            held[ref] = version, tier.counters.bytes_written - before
        elif action == "get":
            assert get(tier, ref, held.get(ref, (0, 0))[0]) is (HIT if ref in held else MISS)
        elif action == "remove":
            tier.remove([ref])
            held.pop(ref, None)
        elif action == "clear":
            tier.clear()
            held.clear()
        else:
            tier.close()
            tier = open_redis(url, codec)
        assert all(tier.contains(list(held)))
        assert {ref: sum(lengths(admin, ref).values()) for ref in held} == {
            ref: size for ref, (_, size) in held.items()
        }
        assert sum(lengths(admin).values()) == sum(size for _, size in held.values())
    tier.close()
