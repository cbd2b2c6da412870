"""The contract of a policy: which chunks of one tier go when room is needed, and whether a new one is worth it.

A policy knows keys, sizes and what was used when. It knows neither leases nor writes in flight: whoever evicts says
what may go. It does no I/O and has no clock, and its caller serialises all calls.

One request is noted like this, by the index and by the simulator alike::

    policy.touch_chain(keys)                    # all of its chunks, those that are not here included
    for each chunk that is not here, head first:
        victims = policy.make_room(missing_bytes, may_go, newcomer=key)    # if it does not fit
        policy.evict(victim) for each of them; policy.add(key, size_bytes) # unless the answer was None
    policy.refresh_chain(keys)                  # now that the new ones have their place
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from typing import ClassVar

from kvstore.errors import InvalidCallError
from kvstore.keys import PrefixKey

MIN_GHOSTS = 65_536
GHOSTS_PER_CHUNK = 8


class Policy(ABC):
    """Orders the chunks of one tier. Subclasses keep the order; sizes, prefixes and the choice of victims are here.

    Attributes:
        name: what ``POLICIES`` calls it.
        filters: whether a new chunk may be refused although others could go. None is refused while there is room,
            because nobody asks then.
        used_bytes: the sum of the sizes of all chunks ordered.
    """

    name: ClassVar[str]
    filters: ClassVar[bool] = False

    def __init__(self, capacity_bytes: int) -> None:
        """Start empty. Any unit will do for sizes, as long as it is the capacity's: a pool counts slots."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: dict[PrefixKey, int] = {}
        self._parents: dict[PrefixKey, PrefixKey] = {}  # of chunks that are here
        self._children: dict[PrefixKey, int] = {}  # how many are here, if any; the parent itself need not be
        self._chain: dict[PrefixKey, PrefixKey | None] = {}  # the last one touched, with parents

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[PrefixKey]:
        """All keys, in no particular order."""
        return iter(self._sizes)

    @property
    @abstractmethod
    def num_ghosts(self) -> int:
        """Keys remembered that are not here; bounded by ``max_ghosts``."""

    @property
    def max_ghosts(self) -> int:
        """How many keys of chunks that are not here may be remembered."""
        return max(MIN_GHOSTS, GHOSTS_PER_CHUNK * len(self._sizes))

    # -- what happened -----------------------------------------------------------------------------------------------

    def touch_chain(self, keys: Iterable[PrefixKey], noted: AbstractSet[PrefixKey] = frozenset()) -> None:
        """Note that a request used a chain, whose keys come head first; those that are not here count as misses.

        Keys ``noted`` for this request already are refreshed only: one that loads a chain, and then stores what it
        loaded, has used it once.
        """
        chain = list(dict.fromkeys(keys))
        used = {key for key in chain if key not in noted}
        self._link(chain)
        self._on_touch(chain, used)

    def refresh_chain(self, keys: Iterable[PrefixKey]) -> None:
        """Keep a chain together and its head warmest, without counting a use."""
        chain = list(dict.fromkeys(keys))
        self._link(chain)
        self._on_touch(chain, frozenset())

    def add(self, key: PrefixKey, size_bytes: int = 1) -> None:
        """Start to order a chunk that was not here. Its prefix is that of the chain touched last, if it is part of it.

        Raises:
            InvalidCallError: it is here already.
        """
        if key in self._sizes:
            raise InvalidCallError(f"a chunk of {self._sizes[key]} bytes was added twice: evict or remove it first")
        self.used_bytes += size_bytes
        self._sizes[key] = size_bytes
        self._set_parent(key, self._chain.get(key))
        self._on_add(key)

    def resize(self, key: PrefixKey, size_bytes: int) -> None:
        """A chunk turned out to take other than the size it was added with. Unknown ones are ignored."""
        if key in self._sizes:
            more_bytes = size_bytes - self._sizes[key]
            self._sizes[key] = size_bytes
            self.used_bytes += more_bytes
            self._on_resize(key, more_bytes)

    def evict(self, key: PrefixKey) -> None:
        """A chunk went to make room; its key may be remembered. Unknown ones are ignored."""
        if key in self._sizes:
            self._on_evict(key)
            self._drop(key)

    def remove(self, key: PrefixKey) -> None:
        """A chunk was deleted, expired or lost: forget it without a trace. Unknown ones are ignored."""
        self._on_remove(key)
        self._drop(key)
        self._chain.pop(key, None)

    # -- what should go ----------------------------------------------------------------------------------------------

    def make_room(
        self, missing_bytes: int, may_go: Callable[[PrefixKey], bool], newcomer: PrefixKey | None = None
    ) -> list[PrefixKey] | None:
        """Chunks whose eviction frees at least so many bytes: all that is needed, or None.

        They go in order of their value, but a chunk before the prefix it hangs on, unless the chunk may not go itself.
        With a ``newcomer`` that is worth less than they are, the answer is None. Nothing is changed: the caller calls
        ``evict``.
        """
        search = _Search(missing_bytes, self._sizes, self._parents, self._children)
        if missing_bytes <= 0:
            return search.victims
        with closing(self._order(newcomer)) as order:
            for key in order:
                if may_go(key) and search.offer(key):
                    return search.victims
        is_choice = self.filters and newcomer is not None
        return search.victims if not is_choice and search.take_waiting() else None

    # -- for subclasses ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _on_touch(self, chain: Sequence[PrefixKey], used: AbstractSet[PrefixKey]) -> None:
        """Note uses, and keep the chain in order. Keys may be unknown, or not here."""

    @abstractmethod
    def _on_add(self, key: PrefixKey) -> None:
        """A chunk is here now; its size is in ``_sizes``."""

    def _on_resize(self, key: PrefixKey, more_bytes: int) -> None:  # noqa: B027 - most keep no sums of their own
        """The size of a chunk that is here has grown by so many bytes, or shrunk."""

    @abstractmethod
    def _on_evict(self, key: PrefixKey) -> None:
        """A chunk goes for room."""

    @abstractmethod
    def _on_remove(self, key: PrefixKey) -> None:
        """A key goes, whether it is here, remembered or unknown."""

    @abstractmethod
    def _order(self, newcomer: PrefixKey | None) -> Generator[PrefixKey]:
        """Keys that are here, the least valuable first; ends before those worth more than the newcomer."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def _link(self, chain: Sequence[PrefixKey]) -> None:
        self._chain = dict(zip(chain, (None, *chain), strict=False))
        parents, sizes = self._parents, self._sizes
        for key, parent in self._chain.items():
            if key not in parents and key in sizes:
                self._set_parent(key, parent)

    def _set_parent(self, key: PrefixKey, parent: PrefixKey | None) -> None:
        if parent is not None and parent != key:
            self._parents[key] = parent
            self._children[parent] = self._children.get(parent, 0) + 1

    def _drop(self, key: PrefixKey) -> None:
        self.used_bytes -= self._sizes.pop(key, 0)
        parent = self._parents.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]


class _Search:
    """Collects victims, so that none leaves a chunk behind that hangs on it, as long as others can go."""

    def __init__(
        self,
        missing_bytes: int,
        sizes: Mapping[PrefixKey, int],
        parents: Mapping[PrefixKey, PrefixKey],
        children: Mapping[PrefixKey, int],
    ) -> None:
        self.victims: list[PrefixKey] = []
        self._missing_bytes = missing_bytes
        self._sizes, self._parents, self._children = sizes, parents, children
        self._gone: dict[PrefixKey, int] = {}  # children among the victims
        self._waiting: dict[PrefixKey, None] = {}  # prefixes of chunks that stay so far

    def offer(self, key: PrefixKey) -> bool:
        """Take the next chunk in order, and prefixes that waited for it; True when all that is needed was found."""
        if self._children.get(key, 0) > self._gone.get(key, 0):
            self._waiting[key] = None
            return False
        while not self._take(key):
            parent = self._parents.get(key)
            if parent not in self._waiting or self._gone[parent] < self._children[parent]:
                return False
            del self._waiting[parent]
            key = parent
        return True

    def take_waiting(self) -> bool:
        """Take prefixes of chunks that may not go themselves, from the ends of the chains to their heads."""
        below = Counter(self._parents.get(key) for key in self._waiting)
        ready = [key for key in self._waiting if not below[key]]
        for key in ready:
            if self._take(key):
                return True
            parent = self._parents.get(key)
            below[parent] -= 1
            if parent in self._waiting and not below[parent]:
                ready.append(parent)
        return False

    def _take(self, key: PrefixKey) -> bool:
        self.victims.append(key)
        self._missing_bytes -= self._sizes[key]
        parent = self._parents.get(key)
        if parent is not None:
            self._gone[parent] = self._gone.get(parent, 0) + 1
        return self._missing_bytes <= 0
