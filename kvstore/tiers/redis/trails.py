"""Trails of chunks in Redis, which lead to chunks that share blocks with a sequence, see ``kvstore.index.trails``.

They are in sorted sets whose scores are all 0, so that a set is in the order of its members. A trail's first byte
decides on its set. The names of the sets contain the epoch, as those of chunks do.

The server evicts chunks, and not their trails. So a ``put`` picks some trails of its set at random, and ``contains``
notes named chunks that are missing: later calls look for their chunks, and remove the trails of evicted ones. While as
much is evicted as is put, about a quarter of the trails are of evicted chunks.

All questions are sent with the tier's other commands, in the same round trip. An error in their answers only costs
hits.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, TypeGuard

from kvstore.index.trails import Trails, is_trail
from kvstore.model.chunks import ChunkRef, chunk_of, is_trail_of
from kvstore.model.errors import TierError
from kvstore.model.keys import PREFIX_KEY_BYTES
from kvstore.model.layout import KVLayout
from kvstore.model.throttle import Throttle
from kvstore.tiers.base import MAX_NEAREST
from kvstore.tiers.redis.calls import Question
from kvstore.tiers.redis.connection import Reply, pack
from kvstore.tiers.redis.names import Home, exists_command
from kvstore.tiers.redis.nodes import SlotMovingError

logger = logging.getLogger(__name__)

SETS: Final = 16
REST_S: Final = 60.0  # after an error
PICKED: Final = 4  # trails that a put checks
CALM: Final = 64  # after this many in a row whose chunks exist, only some puts check
CALM_PUTS: Final = 8  # the puts of which one checks
CHECKED: Final = 16  # doubts in one call; a put waits for so many, because in a cluster their chunks are on all nodes
_DOUBTS: Final = SETS  # number of the doubts among the numbers of sets
_MAX_DOUBTS: Final = 256
_MAX_NAMED: Final = 4096
_LOG_EVERY_S: Final = 3600.0
_LAST_KEY: Final = b"\xff" * PREFIX_KEY_BYTES


class _Doubt(Enum):
    """Next step for a doubtful trail."""

    UNSURE = "look for its chunk"
    GONE = "take it out, and look again, as somebody may be storing the chunk"
    BACK = "put it back"


class Exchange:
    """Questions that are sent with others, and handlers of the answers."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self._takers: list[Callable[[Reply | TierError], None]] = []

    def add(self, question: Question, take: Callable[[Reply | TierError], None]) -> None:
        """Add a question and the handler of its answer."""
        self.questions.append(question)
        self._takers.append(take)

    def take(self, answers: Sequence[Reply | TierError]) -> None:
        """Handle the answers to all questions."""
        for take, answer in zip(self._takers, answers, strict=True):
            take(answer)


@dataclass
class _Known:
    """State of the trails of one epoch; the oldest entries are first, and are dropped first."""

    home: Home
    num_puts: int = 0
    num_sound: int = 0  # trails in a row whose chunks existed
    sizes: list[int] = field(default_factory=lambda: [0] * SETS)
    named: OrderedDict[ChunkRef, bytes] = field(default_factory=OrderedDict)
    doubts: OrderedDict[bytes, _Doubt] = field(default_factory=OrderedDict)


class TrailSets:
    """Questions about trails, and handling of the answers. Thread-safe; the caller sends the questions.

    Args:
        layout: the geometry of the chunks.
        ttl_s: lifetime of chunks in seconds, or None.
    """

    def __init__(self, layout: KVLayout, ttl_s: int | None) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._ttl_s = ttl_s
        self._throttle = Throttle(logger, _LOG_EVERY_S)
        self._lock = threading.Lock()  # guards the fields below
        self._known = _Known(Home(b""))
        self._rests_until_s: dict[int, float] = {}  # by the number of a set, or _DOUBTS

    @property
    def are_kept(self) -> bool:
        """True if no set has failed in the last ``REST_S``."""
        return not any(map(self._rests, range(SETS)))

    def look(self, home: Home, trails: Sequence[bytes]) -> tuple[Exchange, list[list[Reply]]]:
        """Ask for the neighbours of trails. The second value is filled with them when the answers are taken."""
        exchange = Exchange()
        near: list[list[Reply]] = [[] for _ in trails]
        numbers = map(_set_of, trails)
        asked = [item for item in zip(numbers, trails, near, strict=True) if self._is_trail(item[1])]
        if asked:
            self._settle(exchange, home)  # first, or evicted chunks hide existing ones
        for number, trail, found in asked:
            for command in () if self._rests(number) else _neighbours(home.trails_key(number), trail):
                take = partial(self._of_set, number, partial(_take_near, found))
                exchange.add((home.trails_tag(number), [command]), take)
        return exchange, near

    def name(self, home: Home, trails: Sequence[bytes], near: Sequence[Iterable[Reply]]) -> list[tuple[bytes, ...]]:
        """Return the answers to ``Tier.nearest``, given the neighbours of trails."""
        named = [self._best(trail, found) for trail, found in zip(trails, near, strict=True)]
        with self._lock:
            remembered = self._at(home).named
            for trail in (trail for found in named for trail in found):
                remembered[chunk_of(trail)] = trail
            while len(remembered) > _MAX_NAMED:
                remembered.popitem(last=False)
        return named

    def tell(self, home: Home, ref: ChunkRef, trail: bytes) -> Exchange:
        """Write the trail of a chunk that was stored, and check those of others."""
        exchange, number = Exchange(), _set_of(trail)
        if not self._is_trail(trail) or not is_trail_of(trail, ref) or self._rests(number):
            return exchange
        tag, key = home.trails_tag(number), home.trails_key(number)
        with self._lock:
            known = self._at(home)
            known.num_puts += 1
            known.doubts.pop(trail, None)
            picks = known.num_sound < CALM or not known.num_puts % CALM_PUTS
            size, num_doubts = known.sizes[number], len(known.doubts)
        expiry = [pack("EXPIRE", key, self._ttl_s)] if self._ttl_s else []
        add = [_add(home, trail), *expiry, pack("ZCARD", key)]
        exchange.add((tag, add), partial(self._of_set, number, partial(self._take_size, home, number)))
        if picks:
            first = secrets.randbelow(max(1, size))
            picked = pack("ZRANGE", key, first, first + PICKED - 1)
            exchange.add((tag, [picked]), partial(self._of_set, number, partial(self._take_picked, home)))
        if num_doubts >= CHECKED:
            self._settle(exchange, home)
        return exchange

    def taken_back(self, home: Home, ref: ChunkRef, trail: bytes) -> Exchange:
        """Remove the trail of a chunk whose epoch ended before its ``put``."""
        exchange = Exchange()
        if self._is_trail(trail) and is_trail_of(trail, ref):
            self._take_out(exchange, home, trail)
        return exchange

    def note_missing(self, home: Home, refs: Iterable[ChunkRef]) -> None:
        """Note missing chunks; the trails of those that were named become doubtful."""
        with self._lock:
            known = self._at(home)
            gone = [known.named.pop(ref) for ref in refs if ref in known.named] if known.named else []
        self._doubt(home, gone, _Doubt.UNSURE)

    def _settle(self, exchange: Exchange, home: Home) -> None:
        """Add the next steps of the oldest doubts to an exchange."""
        if self._rests(_DOUBTS):
            return
        with self._lock:
            doubts = self._at(home).doubts
            taken = [doubts.popitem(last=False) for _ in range(min(CHECKED, len(doubts)))]
        for trail, doubt in taken:
            number = _set_of(trail)
            if doubt is _Doubt.BACK:
                exchange.add(
                    (home.trails_tag(number), [_add(home, trail)]), partial(self._of_set, number, _take_nothing)
                )
                continue
            if doubt is _Doubt.GONE:
                self._take_out(exchange, home, trail)
            tag = home.tag(chunk_of(trail))
            exchange.add((tag, [exists_command(tag)]), partial(self._take_doubt, home, trail, doubt))

    def _take_out(self, exchange: Exchange, home: Home, trail: bytes) -> None:
        number = _set_of(trail)
        command = pack("ZREM", home.trails_key(number), trail)
        exchange.add((home.trails_tag(number), [command]), partial(self._of_set, number, _take_nothing))

    def _of_set(self, number: int, take: Callable[[Reply], None], answer: Reply | TierError) -> None:
        """Handle the answer of a set, which rests for a while after an error."""
        if not isinstance(answer, TierError):
            take(answer)
        elif self._rest(number, answer):
            self._throttle.log(
                "trails", "Redis does not answer queries for parts of chunks, which costs hits: %s", answer
            )

    def _rest(self, number: int, error: TierError) -> bool:
        """Let a set, or the doubts, rest for ``REST_S`` after an error, unless it is short; True if they rest."""
        if isinstance(error, SlotMovingError):
            return False
        with self._lock:
            self._rests_until_s[number] = time.monotonic() + REST_S
        return True

    def _take_size(self, home: Home, number: int, reply: Reply) -> None:
        with self._lock:
            self._at(home).sizes[number] = reply if isinstance(reply, int) else 0

    def _take_picked(self, home: Home, reply: Reply) -> None:
        picked = reply if isinstance(reply, list) else []
        self._doubt(home, (trail for trail in picked if self._is_trail(trail)), _Doubt.UNSURE)

    def _take_doubt(self, home: Home, trail: bytes, doubt: _Doubt, answer: Reply | TierError) -> None:
        if isinstance(answer, TierError):
            self._rest(_DOUBTS, answer)  # in a cluster, every call would otherwise wait for a node that is down
            return
        with self._lock:
            known = self._at(home)
            known.num_sound = known.num_sound + 1 if answer == 1 else 0
        if doubt is _Doubt.UNSURE and answer == 0:
            self._doubt(home, [trail], _Doubt.GONE)
        elif doubt is _Doubt.GONE and answer == 1:
            self._doubt(home, [trail], _Doubt.BACK)

    def _doubt(self, home: Home, trails: Iterable[bytes], doubt: _Doubt) -> None:
        with self._lock:
            doubts = self._at(home).doubts
            for trail in trails:
                if doubt is not _Doubt.UNSURE or trail not in doubts:
                    doubts[trail] = doubt
            while len(doubts) > _MAX_DOUBTS:
                doubts.popitem(last=False)

    def _best(self, trail: bytes, near: Iterable[Reply]) -> tuple[bytes, ...]:
        trails = Trails()
        trails.add_all(other for other in near if self._is_trail(other))
        return trails.closest(trail, MAX_NEAREST)

    def _at(self, home: Home) -> _Known:
        """Return the state of a home, and drop that of former ones. Needs the lock."""
        if self._known.home != home:
            self._known = _Known(home)
        return self._known

    def _rests(self, number: int) -> bool:
        return self._rests_until_s.get(number, 0.0) > time.monotonic()

    def _is_trail(self, value: Reply) -> TypeGuard[bytes]:
        return isinstance(value, bytes) and is_trail(value, self._blocks_per_chunk)


def _set_of(trail: bytes) -> int:
    return trail[0] % SETS if trail else 0


def _add(home: Home, trail: bytes) -> bytes:
    return pack("ZADD", home.trails_key(_set_of(trail)), 0, trail)


def _neighbours(key: bytes, trail: bytes) -> tuple[bytes, bytes]:
    """Return commands for the next trails on both sides, as far as they share the first block."""
    first = trail[:PREFIX_KEY_BYTES]
    behind = b"(%b" % (int.from_bytes(first) + 1).to_bytes(PREFIX_KEY_BYTES) if first != _LAST_KEY else b"+"
    return (
        pack("ZRANGEBYLEX", key, b"[" + trail, behind, "LIMIT", 0, MAX_NEAREST),
        pack("ZREVRANGEBYLEX", key, b"(" + trail, b"[" + first, "LIMIT", 0, MAX_NEAREST),
    )


def _take_near(found: list[Reply], reply: Reply) -> None:
    if isinstance(reply, list):
        found.extend(reply)


def _take_nothing(reply: Reply) -> None:
    """Ignore the answer."""
