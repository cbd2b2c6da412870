"""Invariants of the index between any two calls, checked for every chunk and lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.index.deadlines import _SLACK, Deadlines, Name
from kvstore.index.entries import GATHERING, LOADING, NO_FILE, NO_SLOT, SENDING, WRITING, Entries
from kvstore.index.index import ChunkIndex
from kvstore.index.leases import Leases
from kvstore.index.slots import Slots, Uses
from kvstore.index.writes import DiskWrites, RemoteSends
from kvstore.model.keys import PREFIX_KEY_BYTES, PrefixKey


def check_invariants(index: ChunkIndex) -> None:
    """Assert the invariants between any two calls."""
    check_expiries(index._chunks)
    check_trails(index._chunks)
    check_slots(index._chunks, index._slots)
    check_disk(index._disk)
    check_sends(index._remote)
    check_leases(index._leases)
    check_retained(index._disk)
    check_uses(index._uses)
    check_owners(index)
    check_checkpoints(index._chunks)


def check_owners(index: ChunkIndex) -> None:
    """Assert that each owner's shares are its chunks, within its quotas, and so are its leases and retention."""
    chunks = index._chunks
    assert all((chunk.owner is None) == (not list(index.owners)) for chunk in chunks.values())
    for share in {id(owner.memory): owner.memory for owner in index.owners}.values():
        mine = {key: c for key, c in chunks.items() if c.owner and c.owner.memory is share and c.memory is not NO_SLOT}
        assert set(share) == mine.keys()
        assert share.used_bytes == len(mine) <= share.capacity_bytes, "a quota of memory was exceeded"
        assert share.num_idle == sum(chunk.in_memory and not chunk.uses for chunk in mine.values())
    for share in {id(owner.disk): owner.disk for owner in index.owners}.values():
        on_disk = {key for key, c in chunks.items() if c.owner and c.owner.disk is share and c.disk is not NO_FILE}
        assert set(share) == on_disk
        assert share.used_bytes == sum(map(index._disk.order.size_of, on_disk))
        assert share.used_bytes <= share.capacity_bytes, "a quota of the disk was exceeded"
        assert share._held == on_disk & index._disk.order._held
    leased, retained = set(index._leases._holders), set(index._disk.retained._stays)
    for owner in index.owners:
        assert owner.num_leased == sum(chunks[key].owner is owner for key in leased) <= owner.max_leased
        assert owner.num_retained == sum(chunks[key].owner is owner for key in retained) <= owner.max_retained


def check_expiries(chunks: Entries) -> None:
    """Assert that the deadlines are the chunks' times to live."""
    moments = {key: chunk.expires_s for key, chunk in chunks.items() if not chunk.forgotten}
    check_deadlines(chunks.expiries, {key: at_s for key, at_s in moments.items() if at_s is not None})


def check_deadlines(deadlines: Deadlines[Name], expected_s: Mapping[Name, float]) -> None:
    """Assert that the deadlines are the expected ones, and that the heap holds all of them and is bounded."""
    heap = deadlines._heap
    assert deadlines._at_s == expected_s
    first_s = {name: at_s for at_s, name in sorted(heap, reverse=True)}
    assert all(first_s[name] <= at_s for name, at_s in expected_s.items())
    assert len(heap) <= 2 * len(expected_s) + _SLACK
    assert all(heap[(place - 1) // 2] <= entry for place, entry in enumerate(heap) if place)


def check_retained(disk: DiskWrites) -> None:
    """Assert that retained chunks are on disk, held by its policy, within the limits, and that all ends are known."""
    retained = disk.retained
    assert retained._stays.keys() == disk.order._held
    assert all(disk.chunks[key].disk is not NO_FILE for key in retained._stays)
    assert retained._of_tenant == Counter(stay.tenant for stay in retained._stays.values())
    assert retained._fresh.keys() <= retained._stays.keys()
    assert len(retained) <= retained._limits.chunks
    assert max(retained._of_tenant.values(), default=0) <= retained._limits.of_tenant
    check_deadlines(retained._ends, {key: stay.until_s for key, stay in retained._stays.items()})


def check_checkpoints(chunks: Entries) -> None:
    """Assert that only checkpoints with a part here are known, each with all of its parts."""
    for key, siblings in chunks._siblings.items():
        assert key in chunks, "a checkpoint that is nowhere"
        assert key in siblings


def check_trails(chunks: Entries) -> None:
    """Assert that every known trail is indexed by its chunk's memory state, and leads to its chunk."""
    with_trail = [chunk for chunk in chunks.values() if chunk.trail]
    near = [chunk.trail for chunk in with_trail if chunk.memory is not NO_SLOT]
    far = [chunk.trail for chunk in with_trail if chunk.memory is NO_SLOT]
    assert (sorted(chunks.near), sorted(chunks.far)) == (sorted(near), sorted(far))
    for chunk in with_trail:
        trails = chunks.far if chunk.memory is NO_SLOT else chunks.near
        assert len(chunk.trail) == chunk.ref.num_blocks * PREFIX_KEY_BYTES
        assert next(trails.nearest(chunk.trail)) == (chunk.ref.prefix_key, chunk.ref.num_blocks)


def check_slots(chunks: Entries, slots: Slots) -> None:
    """Assert that every slot is free or belongs to one chunk, and that the counts agree with the chunks."""
    with_slot = {key: chunk.slot for key, chunk in chunks.items() if chunk.memory is not NO_SLOT}
    assert sorted([*with_slot.values(), *slots.free]) == list(range(slots.num_slots)), "a slot is lost or owned twice"
    assert slots.num_idle == sum(chunk.in_memory and not chunk.uses for chunk in chunks.values())
    assert set(slots.order) == with_slot.keys()
    assert slots.order.used_bytes == len(with_slot)


def check_disk(disk: DiskWrites) -> None:
    """Assert that the policy orders what is on disk or being written, that it fits, and that writes are counted."""
    chunks = disk.chunks.items()
    assert set(disk.order) == {key for key, chunk in chunks if chunk.disk is not NO_FILE}
    assert disk.order.used_bytes <= disk.order.capacity_bytes, "more on disk than fits"
    assert disk.num_writes == sum(chunk.disk is WRITING for _, chunk in chunks) <= disk.max_writes


def check_sends(remote: RemoteSends) -> None:
    """Assert that writes to the remote tier are counted."""
    sending = sum(chunk.remote is SENDING for chunk in remote.chunks.values())
    assert remote.num_sends == sending <= remote.max_sends


def holds_of(leases: Leases) -> Counter[PrefixKey]:
    """Return the number of leases on each chunk."""
    return Counter(key for lease in leases._leases.values() for key in lease.keys)


def check_leases(leases: Leases) -> None:
    """Assert that holders, holds and ends agree with the leases, and that all are bounded."""
    holds = holds_of(leases)
    assert {key: len(names) for key, names in leases._holders.items()} == holds, "a lease is lost"
    assert holds.total() == leases._num_holds <= leases._max_holds
    assert len(holds) <= leases._max_chunks
    check_deadlines(leases.ends, {name: lease.expires_s for name, lease in leases._leases.items()})


def check_uses(uses: Uses) -> None:
    """Assert that every unfinished transfer is in use, and that every lease counts as a use."""
    for key, holds in holds_of(uses.leases).items():
        chunk = uses.chunks[key]
        assert not chunk.forgotten, "a lease on a chunk that is gone"
        assert chunk.uses >= holds, "a lease without its use"
    for key, chunk in uses.chunks.items():
        assert chunk.ref.prefix_key == key
        assert chunk.memory is not NO_SLOT or chunk.disk is not NO_FILE, "a chunk that is nowhere"
        is_moving = chunk.memory in {GATHERING, LOADING} or chunk.disk is WRITING
        assert chunk.uses > 0 or not (is_moving or chunk.forgotten), "unfinished, and nobody at it"
        assert chunk.uses > 0 or uses.keep_in_memory or not chunk.in_memory, "a passage that keeps a chunk"
