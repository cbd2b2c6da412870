"""Contract of a policy: which chunks of one tier are evicted to make room, and if a new one is worth storing.

A policy knows keys, sizes and the order of uses. It knows neither leases nor writes in flight; its caller says which
chunks may be evicted. It does no I/O and has no clock, and its caller serialises all calls.

The index and the simulator report one request like this::

    policy.touch_chain(keys)                    # all of its chunks, including those not in the tier
    for each chunk not in the tier, head first:
        victims = policy.make_room(missing_bytes, may_go, newcomer=key)    # if it does not fit
        policy.evict(victim) for each of them; policy.add(key, size_bytes) # unless the answer was None
    policy.refresh_chain(keys)                  # once the new ones are in the tier
    policy.end_chain(keys, answer_tokens)       # if the length of the answer is known
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from itertools import islice, takewhile
from typing import ClassVar

from kvstore.model.errors import InvalidCallError
from kvstore.model.keys import PrefixKey
from kvstore.policies.prefixes import Prefixes

MIN_GHOSTS = 65_536
GHOSTS_PER_CHUNK = 8
_OFFERED_FIRST = 64


class Policy(ABC):
    """Orders the chunks of one tier. Subclasses keep the order; this class keeps sizes and prefixes, and picks victims.

    Attributes:
        name: its name in ``POLICIES``.
        filters: True if a new chunk may be refused although others could be evicted. While there is room, the policy is
            not asked and no chunk is refused.
        used_bytes: the sum of the sizes of all chunks.
    """

    name: ClassVar[str]
    filters: ClassVar[bool] = False

    def __init__(self, capacity_bytes: int) -> None:
        """Start empty. Sizes may have any unit if the capacity has the same one: a pool counts slots."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: dict[PrefixKey, int] = {}
        self._last_size_bytes = 0
        self._held: set[PrefixKey] = set()
        self._given_up: dict[PrefixKey, None] = {}
        self._prefixes = Prefixes()
        self._chain: dict[PrefixKey, PrefixKey | None] = {}  # the chain touched last, with parents
        self._shares: dict[PrefixKey, Policy] = {}  # of the chunks that were added with one

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._sizes

    def size_of(self, key: PrefixKey) -> int:
        """Return the size of a chunk in the tier."""
        return self._sizes[key]

    def __iter__(self) -> Iterator[PrefixKey]:
        """Iterate over all keys, in no particular order."""
        return iter(self._sizes)

    @property
    @abstractmethod
    def num_ghosts(self) -> int:
        """Number of remembered keys whose chunks are not in the tier; bounded by ``max_ghosts``."""

    @property
    def max_ghosts(self) -> int:
        """Maximum of remembered keys whose chunks are not in the tier."""
        return max(MIN_GHOSTS, GHOSTS_PER_CHUNK * len(self._sizes))

    def by_value(self) -> list[PrefixKey]:
        """Return all keys, the least valuable first. Takes time for each chunk."""
        return list(dict.fromkeys([*self._given_up, *self._order(None), *self._sizes]))

    # -- what happened -----------------------------------------------------------------------------------------------

    def touch_chain(
        self,
        keys: Iterable[PrefixKey],
        noted: AbstractSet[PrefixKey] = frozenset(),
        leaves: AbstractSet[PrefixKey] = frozenset(),
    ) -> None:
        """Note that a request used a chain, given head first; keys of chunks not in the tier count as misses.

        Keys already ``noted`` for this request are only refreshed, because a request that loads a chain and stores it
        again has used it once. No chunk depends on ``leaves``, not even the next one in the chain.
        """
        chain = list(dict.fromkeys(keys))
        used = {key for key in chain if key not in noted}
        self._link(chain, leaves)
        self._on_touch(chain, used)
        for share in self._shares_of(chain):
            share.touch_chain(chain, noted, leaves)

    def refresh_chain(self, keys: Iterable[PrefixKey], leaves: AbstractSet[PrefixKey] = frozenset()) -> None:
        """Keep a chain together and its head most recent, without counting a use."""
        chain = list(dict.fromkeys(keys))
        self._link(chain, leaves)
        self._on_touch(chain, frozenset())
        for share in self._shares_of(chain):
            share.refresh_chain(chain, leaves)

    def end_chain(self, keys: Iterable[PrefixKey], answer_tokens: int) -> None:
        """Note that a request has ended, after an answer of so many tokens; its keys may come in any order."""
        self._on_end(list(dict.fromkeys(keys)), answer_tokens)

    def add(self, key: PrefixKey, size_bytes: int = 1, share: Policy | None = None) -> None:
        """Add a chunk. If it is part of the chain touched last, it depends on the chunk before it there.

        ``share`` orders the chunks of an owner. The chunk is in it for as long as it is here, and with the same size.

        Raises:
            InvalidCallError: it has already been added.
        """
        self._enter(key, size_bytes)
        self._on_add(key)
        if share is not None:
            self._shares[key] = share
            share.add(key, size_bytes)

    def adopt(self, chunks: Iterable[tuple[PrefixKey, int, Policy | None]]) -> None:
        """``add`` the chunks that an earlier process left, with their sizes and shares, the longest untouched first.

        Raises:
            InvalidCallError: one has already been added; those before it are added.
        """
        added: list[PrefixKey] = []
        try:
            for key, size_bytes, share in chunks:
                self._enter(key, size_bytes)
                added.append(key)
                if share is not None:
                    self._shares[key] = share
                    share.add(key, size_bytes)
        finally:
            self._on_adopt(added)

    def resize(self, key: PrefixKey, size_bytes: int) -> None:
        """Correct the size of a chunk. Unknown keys are ignored."""
        if key in self._sizes:
            more_bytes = size_bytes - self._sizes[key]
            self._sizes[key] = size_bytes
            self.used_bytes += more_bytes
            if key not in self._held:
                self._on_resize(key, more_bytes)
            if key in self._shares:
                self._shares[key].resize(key, size_bytes)

    def hold(self, key: PrefixKey) -> None:
        """Offer a chunk for eviction no more, until ``free``: that is faster than to ask for it each time.

        Most policies treat it like an evicted one, whose key is remembered. Unknown keys are ignored.
        """
        if key in self._sizes and key not in self._held:
            self._held.add(key)
            self._given_up.pop(key, None)
            self._on_hold(key)
            if key in self._shares:
                self._shares[key].hold(key)

    def free(self, key: PrefixKey) -> None:
        """Offer a held chunk for eviction again, as one that has just been added. Other keys are ignored."""
        if key in self._held:
            self._held.remove(key)
            self._on_add(key)
            if key in self._shares:
                self._shares[key].free(key)

    def give_up(self, keys: Iterable[PrefixKey]) -> int:
        """Offer the end of a chain for eviction before all others, until it is used again; return how many chunks.

        The keys are given head first. A chunk on which others in the tier depend stays, with its prefix, so a stem that
        conversations share is not given up. Held chunks stay, too.
        """
        end = list(takewhile(lambda key: key not in self._held, self.own_end(keys)))
        self._given_up.update(dict.fromkeys(end))
        for share in self._shares_of(end):
            share.give_up(reversed(end))
        return len(end)

    def own_end(self, keys: Iterable[PrefixKey]) -> Iterator[PrefixKey]:
        """Yield the end of a chain, last chunk first, up to one on which other chunks in the tier depend.

        The keys are given head first; those that are not in the tier are left out.
        """
        below = Counter[PrefixKey | None]()  # of these, yielded
        for key in reversed([key for key in dict.fromkeys(keys) if key in self._sizes]):
            if self._prefixes.num_children(key) > below[key]:
                return
            below[self._prefixes.parent(key)] += 1
            yield key

    def evict(self, key: PrefixKey) -> None:
        """Drop a chunk evicted to make room; its key may be remembered. Unknown keys are ignored."""
        if key in self._sizes:
            if key in self._held:
                self._held.remove(key)
            else:
                self._on_evict(key)
            self._drop(key)

    def remove(self, key: PrefixKey) -> None:
        """Forget a deleted, expired or lost chunk and its key. Unknown keys are ignored."""
        self._on_remove(key)
        self._held.discard(key)
        self._drop(key)
        self._chain.pop(key, None)

    # -- what should go ----------------------------------------------------------------------------------------------

    def make_room(
        self, missing_bytes: int, may_go: Callable[[PrefixKey], bool], newcomer: PrefixKey | None = None
    ) -> list[PrefixKey] | None:
        """Return chunks whose eviction frees at least ``missing_bytes``, or None if there are not enough of them.

        The least valuable are evicted first, but a chunk before the prefix it depends on, unless the chunk itself may
        not be evicted. Returns None, too, if a ``newcomer`` is worth less than they are. Nothing changes: the caller
        calls ``evict``.
        """
        search = _Search(missing_bytes, self._sizes, self._prefixes)
        if missing_bytes <= 0:
            return search.victims
        with closing(self._offers(newcomer)) as offers:
            for key in offers:
                if may_go(key) and search.offer(key):
                    return search.victims
        is_choice = self.filters and newcomer is not None
        return search.victims if not is_choice and search.take_waiting() else None

    # -- for subclasses ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        """Note uses, and keep the chain in order. Keys may be unknown, or of chunks not in the tier."""

    def _on_end(self, chain: Sequence[PrefixKey], answer_tokens: int) -> None:  # noqa: B027 - most learn nothing from it
        """Note the end of a request. Keys may be unknown, or of chunks not in the tier."""

    @abstractmethod
    def _on_add(self, key: PrefixKey) -> None:
        """Add a chunk, whose size is in ``_sizes``."""

    def _on_adopt(self, keys: Sequence[PrefixKey]) -> None:
        """Add chunks of an earlier process, the longest untouched first, all with their sizes in ``_sizes``."""
        for key in keys:
            self._on_add(key)

    def _on_resize(self, key: PrefixKey, more_bytes: int) -> None:  # noqa: B027 - most keep no sums of their own
        """Correct the size of a chunk by ``more_bytes``, which may be negative."""

    @abstractmethod
    def _on_evict(self, key: PrefixKey) -> None:
        """Drop a chunk that makes room; its key may be remembered."""

    def _on_hold(self, key: PrefixKey) -> None:
        """Take a chunk out of the order until it is added again."""
        self._on_evict(key)

    @abstractmethod
    def _on_remove(self, key: PrefixKey) -> None:
        """Forget a key, whether its chunk is in the tier, held or not, remembered or unknown."""

    @abstractmethod
    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        """Yield keys of chunks in the tier, the least valuable first, without those worth more than the newcomer."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def _shares_of(self, chain: Iterable[PrefixKey]) -> Iterable[Policy]:
        """Return the shares of a chain's chunks in the tier."""
        return {self._shares[key]: None for key in chain if key in self._shares} if self._shares else ()

    def _offers(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        """Yield some of what was given up, and then the others in the policy's order."""
        first = dict.fromkeys(islice(self._given_up, _OFFERED_FIRST))
        yield from first
        for key in first:  # those that may not go yet would be asked for each time
            self._given_up[key] = self._given_up.pop(key)
        with closing(self._order(newcomer)) as order:
            for key in order:
                if key not in first:
                    yield key

    def _link(self, chain: Sequence[PrefixKey], leaves: AbstractSet[PrefixKey]) -> None:
        prefix: list[PrefixKey | None] = [None, *chain]
        for place, key in enumerate(chain, 1) if leaves else ():
            if key in leaves:
                prefix[place] = prefix[place - 1]
        for key in chain if self._given_up else ():
            self._given_up.pop(key, None)
        self._chain = dict(zip(chain, prefix, strict=False))
        prefixes, sizes = self._prefixes, self._sizes
        for key, parent in self._chain.items():
            if key in sizes and key not in prefixes:
                self._set_parent(key, parent)

    def _set_parent(self, key: PrefixKey, parent: PrefixKey | None) -> None:
        if parent is not None and parent != key:
            self._prefixes.link(key, parent)

    def _enter(self, key: PrefixKey, size_bytes: int) -> None:
        if key in self._sizes:
            raise InvalidCallError(f"a chunk of {self._sizes[key]} bytes was added twice: evict or remove it first")
        self.used_bytes += size_bytes
        if size_bytes == self._last_size_bytes:
            size_bytes = self._last_size_bytes  # one object for all chunks of one size
        self._last_size_bytes = self._sizes[key] = size_bytes
        self._set_parent(key, self._chain.get(key))

    def _drop(self, key: PrefixKey) -> None:
        self.used_bytes -= self._sizes.pop(key, 0)
        self._given_up.pop(key, None)
        if (share := self._shares.pop(key, None)) is not None:
            share.evict(key)
        self._prefixes.unlink(key)


class _Search:
    """Collects victims. While others can be evicted, no chunk is left behind without its prefix."""

    def __init__(self, missing_bytes: int, sizes: Mapping[PrefixKey, int], prefixes: Prefixes) -> None:
        self.victims: list[PrefixKey] = []
        self._missing_bytes = missing_bytes
        self._sizes, self._prefixes = sizes, prefixes
        self._gone: dict[PrefixKey, int] = {}  # numbers of children among the victims
        self._waiting: dict[PrefixKey, None] = {}  # prefixes of chunks not taken so far

    def offer(self, key: PrefixKey) -> bool:
        """Take the next chunk in order, and prefixes that waited for it; True once they free enough."""
        if self._prefixes.num_children(key) > self._gone.get(key, 0):
            self._waiting[key] = None
            return False
        while not self._take(key):
            parent = self._prefixes.parent(key)
            if parent not in self._waiting or self._gone[parent] < self._prefixes.num_children(parent):
                return False
            del self._waiting[parent]
            key = parent
        return True

    def take_waiting(self) -> bool:
        """Take prefixes of chunks that may not be evicted, from the ends of the chains towards their heads."""
        below = Counter(self._prefixes.parent(key) for key in self._waiting)
        ready = [key for key in self._waiting if not below[key]]
        for key in ready:
            if self._take(key):
                return True
            parent = self._prefixes.parent(key)
            below[parent] -= 1
            if parent in self._waiting and not below[parent]:
                ready.append(parent)
        return False

    def _take(self, key: PrefixKey) -> bool:
        self.victims.append(key)
        self._missing_bytes -= self._sizes[key]
        parent = self._prefixes.parent(key)
        if parent is not None:
            self._gone[parent] = self._gone.get(parent, 0) + 1
        return self._missing_bytes <= 0
