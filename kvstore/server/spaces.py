"""Namespaces, their chunks, and the quotas that they share. Plain state, which ``stock.py`` changes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvstore.index.trails import TRAIL_SHARE, Trails
from kvstore.model.chunks import ChunkRef, is_trail_of
from kvstore.model.keys import NAMESPACE_ID_BYTES, Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.messages import pack_refs
from kvstore.protocol.payload import PAGE_BYTES, Run, encode_geometry
from kvstore.server.pool import pages_of

NO_QUOTA: Final = 1 << 62


@dataclass(eq=False, repr=False, slots=True)
class Chunk:
    """One chunk of a namespace, in memory, on disk or both.

    Attributes:
        space: the namespace.
        ref: its name in the namespace.
        key: its name among the chunks of all namespaces.
        num_bytes: bytes of its payload.
        size_bytes: bytes of its pages in memory, which also count against a quota.
        runs: its pages in memory; empty if it has none.
        disk_bytes: bytes that it takes on disk; 0 if it is not there.
        uses: number of reads, loads and writes under way, during which its pages are not reused.
        pin_end_s: end of its pin; 0 if it is not pinned.
        is_whole: True if all of it is in memory; False while it is written, or read from disk.
        is_dropped: True once it is unreachable; its pages are freed with the last use.
        epoch: epoch of its namespace when its write began.
        sums: known checksums of parts of its payload in memory, by offset and length.
        trail: the keys at the ends of its blocks; empty if they are unknown.
        until_s: end of its time to live, on the server's clock; None for no end.
        owner: id of its owner, as its writer named it; empty without one.
        account: where its bytes count.
    """

    space: Space
    ref: ChunkRef
    key: bytes = field(init=False)
    num_bytes: int = field(init=False)
    size_bytes: int = field(init=False)
    runs: tuple[Run, ...] = ()
    disk_bytes: int = 0
    uses: int = 0
    pin_end_s: int = 0
    is_whole: bool = False
    is_dropped: bool = False
    epoch: int = field(init=False)
    sums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    trail: bytes = b""
    until_s: float | None = None
    owner: bytes = b""
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.account = self.space.account_of(self.owner)
        self.key = self.space.key_of(self.ref)
        self.num_bytes = self.space.layout.payload_bytes(self.ref.num_blocks)
        self.size_bytes = pages_of(self.num_bytes) * PAGE_BYTES
        self.epoch = self.space.epoch

    @property
    def quota(self) -> Quota:
        """The one quota that it counts against."""
        return self.account.quota

    @property
    def is_pinned(self) -> bool:
        """True if it is kept from eviction."""
        return self.pin_end_s != 0 and not self.is_cleared

    @property
    def is_cleared(self) -> bool:
        """True if its namespace was cleared since its write began."""
        return self.epoch != self.space.epoch

    @property
    def is_gone(self) -> bool:
        """True if it cannot be found any more. From any thread."""
        return self.is_dropped or self.is_cleared

    def note_read(self) -> None:
        """Count a read that was granted to a client."""
        self.space.counters.read_chunks += 1
        self.space.counters.read_bytes += self.num_bytes

    def describe(self, trail: bytes) -> None:
        """Keep the trail, unless it is large in comparison with the payload."""
        if is_trail_of(trail, self.ref) and len(trail) <= self.num_bytes // TRAIL_SHARE:
            self.trail = trail


class Quota:
    """Limit on the bytes that some namespaces of a tenant, or an owner in all of them, hold together.

    Attributes:
        tenant: tenant of the namespaces.
        name: configured name of the quota; empty if none was configured.
        limit_bytes: limit in memory and on disk together, where each chunk counts once.
        used_bytes: bytes of all chunks that count, those being written included.
    """

    def __init__(self, tenant: str = "", name: str = "", limit_bytes: int = NO_QUOTA) -> None:
        self.tenant = tenant
        self.name = name
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._chunks: OrderedDict[Chunk, None] = OrderedDict()  # kept only if there is a limit

    def lacks(self, num_bytes: int) -> bool:
        """Tell if so many more bytes would exceed the limit."""
        return self.used_bytes + num_bytes > self.limit_bytes

    def touch(self, chunk: Chunk) -> None:
        """Note that a chunk was stored or read."""
        if self.limit_bytes != NO_QUOTA:
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)

    def adopt(self, chunk: Chunk) -> None:
        """Note a chunk that was used longer ago than all others, unless it is known."""
        if self.limit_bytes != NO_QUOTA and chunk not in self._chunks:
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk, last=False)

    def drop(self, chunk: Chunk) -> None:
        """Note that a chunk is gone, or counts against another quota."""
        self._chunks.pop(chunk, None)

    def by_age(self) -> Iterator[Chunk]:
        """Iterate over the chunks that count, the least recently used first."""
        return iter(self._chunks)

    def settle(self, *, keeps_order: bool) -> Iterator[None]:
        """Forget the chunks that count against another quota now, or all without a limit or an order, in steps."""
        for chunk in list(self._chunks):
            if chunk.quota is not self or self.limit_bytes == NO_QUOTA or not keeps_order:
                self.drop(chunk)
            yield


class Account:
    """Bytes of one namespace that count against one quota: those of an owner, or of all that have no quota.

    Attributes:
        quota: the quota, which ``count_against`` changes.
        used_bytes: bytes of its chunks, those being written included.
        stored_bytes: bytes of those that can be found.
    """

    def __init__(self, space: Space, quota: Quota) -> None:
        self.quota = quota
        self.used_bytes = 0
        self.stored_bytes = 0
        self._space = space

    def charge(self, num_bytes: int) -> None:
        """Count so many more bytes; fewer, if it is negative."""
        self.used_bytes += num_bytes
        self.quota.used_bytes += num_bytes
        self._space.used_bytes += num_bytes

    def drop(self, num_bytes: int) -> None:
        """Count so many bytes less, which could be found."""
        self.stored_bytes -= num_bytes
        self.charge(-num_bytes)

    def count_against(self, quota: Quota) -> None:
        """Count all bytes against another quota."""
        self.quota.used_bytes -= self.used_bytes
        quota.used_bytes += self.used_bytes
        self.quota = quota


@dataclass
class SpaceCounters:
    """Counters of a namespace since the server started."""

    lookups: int = 0  # for prompts, not of clients that may send the chunks
    found_chunks: int = 0  # in lookups
    missing_chunks: int = 0
    stored_chunks: int = 0
    stored_bytes: int = 0
    read_chunks: int = 0
    read_bytes: int = 0
    loaded_chunks: int = 0  # read from disk into memory for a client
    full: int = 0
    failed: int = 0
    evicted_chunks: int = 0
    expired_chunks: int = 0

    def count_lookup(self, found: bytes) -> None:
        """Count a lookup, with one byte for each chunk, 1 if it was found."""
        self.lookups += 1
        num_found = sum(found)
        self.found_chunks += num_found
        self.missing_chunks += len(found) - num_found


@dataclass
class Space:
    """A namespace.

    Attributes:
        id: 8 bytes that stand for namespace, geometry and tenant; users see the namespace's id instead.
        namespace: its fields.
        layout: the geometry of its chunks.
        tenant: owner of the chunks; empty for all clients without a tenant.
        chunks: its chunks, the least recently used first.
        trails: trails of the chunks that have one.
        owned: quotas of the tenant's owners, by id.
        used_bytes: bytes of all chunks, those being written included.
        epoch: number of times that it was cleared.
        num_sessions: number of clients that use it now.
        num_ending: number of chunks with a time to live, those that were cleared but not dropped included.
        common: account of the chunks whose owner has no quota.
        accounts: accounts of owners that have a quota, or had one when a chunk was stored, by id.
    """

    namespace: Namespace
    layout: KVLayout
    tenant: str = ""
    chunks: dict[ChunkRef, Chunk] = field(default_factory=dict)
    trails: Trails = field(default_factory=Trails)
    owned: Mapping[bytes, Quota] = field(default_factory=dict)
    used_bytes: int = 0
    epoch: int = 0
    num_sessions: int = 0
    num_ending: int = 0
    counters: SpaceCounters = field(default_factory=SpaceCounters)
    common: Account = field(init=False)
    accounts: dict[bytes, Account] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The same names stand for other bytes with another geometry, and for another tenant's bytes.
        name = self.namespace.id + encode_geometry(self.layout) + self.tenant.encode()
        self.id = hashlib.sha256(name).digest()[:NAMESPACE_ID_BYTES]
        self.common = Account(self, Quota())

    @property
    def quota(self) -> Quota:
        """The quota of all chunks whose owner has none, which it shares with other namespaces."""
        return self.common.quota

    @property
    def stored_bytes(self) -> int:
        """Bytes of the chunks that can be found."""
        return sum(account.stored_bytes for account in self.all_accounts())

    def all_accounts(self) -> list[Account]:
        """Return all accounts, which are as many as quotas are configured at most, or were."""
        return [self.common, *self.accounts.values()]

    def account_of(self, owner: bytes) -> Account:
        """Return the account of an owner's chunks; unknown owners share one."""
        account = self.accounts.get(owner)
        if account is None and owner in self.owned:
            account = self.accounts[owner] = Account(self, self.owned[owner])
        return account or self.common

    @property
    def is_bounded(self) -> bool:
        """True if any of its chunks count against a quota with a limit."""
        return any(account.quota.limit_bytes != NO_QUOTA for account in self.all_accounts())

    def forget_accounts(self) -> None:
        """Forget the empty accounts of owners that have no quota any more."""
        self.accounts = {owner: of for owner, of in self.accounts.items() if of.used_bytes or owner in self.owned}

    def move(self, chunk: Chunk) -> bool:
        """Count a chunk in its owner's account, which may be another one since quotas changed; True if it is."""
        before, account = chunk.account, self.account_of(chunk.owner)
        if account is before:
            return False
        before.quota.drop(chunk)
        before.charge(-chunk.size_bytes)
        account.charge(chunk.size_bytes)
        if self.chunks.get(chunk.ref) is chunk:
            before.stored_bytes -= chunk.size_bytes
            account.stored_bytes += chunk.size_bytes
        chunk.account = account
        return True

    def key_of(self, ref: ChunkRef) -> bytes:
        """Return the name of a chunk among those of all namespaces."""
        return self.id + pack_refs([ref])

    def has_size(self, ref: ChunkRef) -> bool:
        """Tell if there can be a chunk of that many blocks."""
        return 0 < ref.num_blocks <= self.layout.blocks_per_chunk


def fields_bytes(fields: Mapping[str, str | int]) -> int:
    """Return the length of a namespace's fields in a message."""
    return len(msgspec.msgpack.encode(dict(fields)))
