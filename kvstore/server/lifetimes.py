"""Ends of chunks with a time to live, on the server's clock; on disk they are in seconds since 1970."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvstore.index.deadlines import Deadlines
from kvstore.model.lifetime import lasts
from kvstore.server.spaces import Chunk

NO_END_MS = 0  # as the rest of a time to live
_NO_CHUNK = -1


class Lifetimes:
    """Ends of the chunks that have one. Belongs to the thread that decides.

    Args:
        now: the monotonic time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._deadlines = Deadlines[bytes]()

    def hides(self, chunk: Chunk, *, hears_ends: bool = True) -> bool:
        """Tell if a chunk is not found: its time is over, or it has one and a client does not hear of ends."""
        return chunk.until_s is not None and (not hears_ends or chunk.until_s <= self._now())

    def end_in(self, rest_ms: int) -> float | None:
        """Return the end of a time to live with a rest."""
        return None if rest_ms == NO_END_MS else self._now() + rest_ms / 1000

    def rests_ms(self, chunks: Iterable[Chunk | None]) -> list[int]:
        """Return the rest of each chunk's time: 0 if it has no end, negative if it is over or there is no chunk."""
        now_s = self._now()

        def rest_ms(chunk: Chunk | None) -> int:
            if chunk is None or chunk.until_s is None:
                return _NO_CHUNK if chunk is None else NO_END_MS
            return max(1, int((chunk.until_s - now_s) * 1000)) if chunk.until_s > now_s else _NO_CHUNK

        return list(map(rest_ms, chunks))

    def enter(self, chunk: Chunk) -> None:
        """Note the end of a chunk that can be found from now on."""
        if chunk.until_s is not None:
            chunk.space.num_ending += 1
            self._deadlines.set(chunk.key, chunk.until_s)

    def prolong(self, chunk: Chunk, rest_ms: int) -> bool:
        """Let a chunk that can be found stay for longer; return False if its end is later already, or over."""
        until_s = self.end_in(rest_ms)
        if self.hides(chunk) or lasts(chunk.until_s, until_s):
            return False
        self.drop(chunk)
        chunk.until_s = until_s
        self.enter(chunk)
        return True

    def drop(self, chunk: Chunk) -> None:
        """Forget the end of a chunk that cannot be found any more, or gets another end."""
        if chunk.until_s is not None:
            chunk.space.num_ending -= 1
            self._deadlines.withdraw(chunk.key)

    def each_due(self) -> Iterator[bytes | None]:
        """Remove the keys of the chunks that have ended by now; None stands for a step that removes none."""
        return self._deadlines.each_due(self._now())
