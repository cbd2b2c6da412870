"""Hand-overs of chunks to a real cache server: layer by layer, all or nothing, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from support.cache_server import ServerThread, serving_tcp

from kvstore.handover.tcp import TcpTransport, open_transport
from kvstore.handover.transport import Parcel
from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer

LAYOUT = KVLayout((4096, 8192, 4096), planes=2, block_tokens=16, chunk_tokens=64)
BIG = KVLayout((1 << 18,) * 5, planes=2, block_tokens=16, chunk_tokens=64)
MINE = Namespace({"model": "mine"})


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving_tcp() as running:
        yield running


@pytest.fixture
def tier(server: ServerThread) -> Iterator[Tier]:
    tier = open_tier("server", TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": server.url}))
    yield tier
    tier.close()


@pytest.fixture
def transport(server: ServerThread) -> Iterator[TcpTransport]:
    transport = open_transport(server.url, MINE, LAYOUT, {"timeout_s": 5.0})
    yield transport
    transport.close()


def parcel(number: int, num_blocks: int = 4, layout: KVLayout = LAYOUT) -> Parcel:
    rng = np.random.default_rng(number)
    payload = rng.integers(0, 256, layout.payload_bytes(num_blocks), np.uint8)
    return Parcel(ChunkRef(number.to_bytes(16, "big"), num_blocks), payload)


def read(tier: Tier, refs: Sequence[ChunkRef], layout: KVLayout = LAYOUT) -> list[tuple[Outcome, ByteArray]]:
    buffers = [np.zeros(layout.slot_bytes, np.uint8) for _ in refs]
    outcomes = tier.get([Transfer(ref, buffer) for ref, buffer in zip(refs, buffers, strict=True)])
    sizes = [layout.payload_bytes(ref.num_blocks) for ref in refs]
    return [(outcome, buffer[:size]) for outcome, buffer, size in zip(outcomes, buffers, sizes, strict=True)]


@pytest.mark.parametrize("layers", [[range(3)], [range(1), range(1, 2), range(2, 3)], [range(2), range(2, 3)]])
def test_what_is_handed_over_is_found_there(transport: TcpTransport, tier: Tier, layers: list[range]) -> None:
    parcels = [parcel(1), parcel(2), parcel(3, num_blocks=1)]
    assert transport.deliver(parcels, iter(layers)) == [Outcome.STORED] * 3
    for (outcome, payload), sent in zip(read(tier, [sent.ref for sent in parcels]), parcels, strict=True):
        assert outcome is Outcome.HIT
        assert np.array_equal(payload, sent.payload)


def test_layers_go_while_others_are_not_there_yet(transport: TcpTransport, tier: Tier) -> None:
    """The bytes of a later layer are read only after the layer was named."""
    sent = parcel(1)
    wanted = sent.payload.copy()
    sent.payload[:] = 0

    def computed() -> Iterator[range]:
        for layer in range(LAYOUT.num_layers):
            begin, end = LAYOUT.layer_range(layer, 4)
            sent.payload[begin:end] = wanted[begin:end]
            assert tier.contains([sent.ref]) == [False]
            yield range(layer, layer + 1)

    assert transport.deliver([sent], computed()) == [Outcome.STORED]
    assert np.array_equal(read(tier, [sent.ref])[0][1], wanted)


@pytest.mark.parametrize("layers", [[], [range(1)], [range(2)]])
def test_without_the_last_layer_nothing_is_found(
    server: ServerThread, transport: TcpTransport, tier: Tier, layers: list[range]
) -> None:
    sent = [parcel(1), parcel(2)]
    assert transport.deliver(sent, iter(layers)) == [Outcome.FAILED] * 2
    assert tier.contains([one.ref for one in sent]) == [False] * 2
    assert not any(space.chunks for space in server.hub.stock.spaces.values())
    assert transport.deliver(sent, iter([range(3)])) == [Outcome.STORED] * 2  # the places were given back


def test_what_is_there_is_not_sent_again(transport: TcpTransport, tier: Tier) -> None:
    transport.deliver([parcel(1)], iter([range(3)]))
    other = Parcel(parcel(1).ref, parcel(9).payload)  # would be wrong bytes if it were sent
    assert transport.deliver([other, parcel(2)], iter([range(3)])) == [Outcome.STORED] * 2
    assert np.array_equal(read(tier, [other.ref])[0][1], parcel(1).payload)


def test_more_than_one_client_may_hold_at_once() -> None:
    """A client may be writing to a quarter of the server's memory; the rest follows."""
    with serving_tcp(pool_bytes=100 << 20) as server:
        transport = open_transport(server.url, MINE, BIG, {"timeout_s": 10.0})
        parcels = [parcel(number, layout=BIG) for number in range(6)]  # 10 MiB each
        assert transport.deliver(parcels, iter([range(2), range(2, 5)])) == [Outcome.STORED] * 6
        tier = open_tier("server", TierSetup(MINE, BIG, UNBOUNDED_BYTES, {"url": server.url}))
        assert all(tier.contains([sent.ref for sent in parcels]))
        for number in (0, 5):
            assert np.array_equal(read(tier, [parcels[number].ref], BIG)[0][1], parcels[number].payload)
        tier.close()
        transport.close()


def test_what_waits_for_room_is_not_sent_without_the_last_layer() -> None:
    with serving_tcp(pool_bytes=512 << 10) as server:  # a client may be writing to one chunk
        transport = open_transport(server.url, MINE, LAYOUT, {"timeout_s": 5.0})
        tier = open_tier("server", TierSetup(MINE, LAYOUT, UNBOUNDED_BYTES, {"url": server.url}))
        sent = [parcel(1), parcel(2)]
        assert transport.deliver(sent, iter([range(2)])) == [Outcome.FAILED] * 2
        assert tier.contains([one.ref for one in sent]) == [False] * 2
        assert transport.deliver(sent, iter([range(3)])) == [Outcome.STORED] * 2
        tier.close()
        transport.close()


def test_a_receiver_that_goes_away_in_the_middle(server: ServerThread) -> None:
    transport = open_transport(server.url, MINE, LAYOUT, {"timeout_s": 0.5})

    def computed() -> Iterator[range]:
        yield range(1)
        server.close()
        yield range(1, 3)

    with pytest.raises(TierError):
        transport.deliver([parcel(1)], computed())
    transport.close()


def test_a_sender_that_dies_leaves_nothing(server: ServerThread, tier: Tier) -> None:
    transport = open_transport(server.url, MINE, LAYOUT, {"timeout_s": 5.0})

    def dies() -> Iterator[range]:
        yield range(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transport.deliver([parcel(1)], dies())
    transport.close()
    assert tier.contains([parcel(1).ref]) == [False]


def test_nobody_there() -> None:
    transport = open_transport("kvs://127.0.0.1:1", MINE, LAYOUT, {"timeout_s": 0.5})
    with pytest.raises(TierError, match="cannot be reached"):
        transport.deliver([parcel(1)], iter([range(3)]))
    transport.close()


@pytest.mark.parametrize("field", ["dtype", "model_config", "shard"])
def test_an_engine_of_another_kind_is_refused_by_name(field: str) -> None:
    """A receiver's own server takes only what its engine can use, and names what differs."""
    fields = {"model": "files 1", "model_config": "a", "dtype": "torch.float32", "shard": "pp 0/1 tp 0/2"}
    owner = Namespace(fields)
    options = EmbeddedOptions(16 << 20, "127.0.0.1", 0)
    server = EmbeddedServer(owner, LAYOUT, options)
    try:
        url = f"kvs://127.0.0.1:{server.port}"
        stranger = open_transport(url, Namespace({**fields, field: "another"}), LAYOUT, {"timeout_s": 5.0})
        with pytest.raises(TierError, match=field):
            stranger.deliver([parcel(1)], iter([range(3)]))
        stranger.close()
        friend = open_transport(url, owner, LAYOUT, {"timeout_s": 5.0})
        assert friend.deliver([parcel(1)], iter([range(3)])) == [Outcome.STORED]
        friend.close()
    finally:
        server.close()
