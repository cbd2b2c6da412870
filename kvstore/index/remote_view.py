"""The known contents of a remote tier: its recent answers, each valid for a short time.

Other engines store there, and the tier evicts by its own rules, so answers expire soon. A stale "yes" ends in a miss
when the chunk is loaded; a stale "no" costs recomputing. Only answers are remembered. A time-out says nothing about a
chunk, and counts only for the request that waited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from kvstore.index.trails import RemoteTrails
from kvstore.model.chunks import Answer, Asked, ChunkRef, Presence, end_of

MAX_ANSWERS = 1 << 18  # about 50 MB; beyond that the oldest are forgotten
MAX_TRAILS: Final = 1 << 14  # trails asked about, likewise
MIN_TOLD_S: Final = 1.0  # minimum validity of an answer for the request that asked


Item = TypeVar("Item", bound=Asked)


class _Answer(NamedTuple):
    presence: Presence
    expires_s: float


class _Heard(NamedTuple):
    """Answers to one question, as one request received them."""

    answers: Mapping[Asked, Answer]
    expires_s: float
    serial: int  # of the view at that time


class RemoteAnswers:
    """Answers given to one request or call. They count for that one only, in addition to the view's.

    Args:
        source: an engine named by the request, which is asked as well; empty for none.
    """

    def __init__(self, source: str = "") -> None:
        self.source = source
        self._heard: list[_Heard] = []
        self._gave_up = False
        self._lacks_some = False

    @property
    def is_incomplete(self) -> bool:
        """True if the tier did not answer everything in time."""
        return self._gave_up or self._lacks_some

    def note(self, answers: Mapping[Asked, Answer], now_s: float, expires_s: float, serial: int) -> None:
        """Note answers to this request's questions. A chunk whose answer is None counts as missing for it."""
        self._heard = [heard for heard in self._heard if heard.expires_s > now_s]  # it may keep asking for minutes
        self._heard.append(_Heard(answers, expires_s, serial))
        self._lacks_some |= None in answers.values()

    def give_up(self) -> None:
        """Stop waiting: whatever has no answer counts as missing from now on."""
        self._gave_up = True

    def holds(self, ref: ChunkRef, now_s: float, since: int = 0) -> bool | None:
        """Tell if the tier has the chunk by answers no older than serial ``since`` of the view; None if unknown."""
        for answers, expires_s, serial in reversed(self._heard):
            if ref in answers and expires_s > now_s and not _is_over(answers[ref], now_s):
                return serial >= since and bool(answers[ref])
        return False if self._gave_up else None

    def until_s(self, ref: ChunkRef, now_s: float) -> float | None:
        """Return the end of a chunk's time to live by these answers; None if it has none, or is unknown."""
        for answers, expires_s, _ in reversed(self._heard):
            if ref in answers and expires_s > now_s and not _is_over(answers[ref], now_s):
                return end_of(answers[ref])
        return None

    def was_asked(self, trail: bytes, now_s: float) -> bool:
        """Tell if this request need not ask about a trail, as it was answered or the request gave up."""
        return self._gave_up or any(trail in heard.answers and heard.expires_s > now_s for heard in self._heard)

    def forget_missing(self) -> None:
        """Drop the negative answers, because those chunks are on their way."""
        self._gave_up = self._lacks_some = False
        found = (
            heard._replace(answers={item: answer for item, answer in heard.answers.items() if answer})
            for heard in self._heard
        )
        self._heard = [heard for heard in found if heard.answers]


NO_ANSWERS: Final = RemoteAnswers()  # for callers that do not ask


def _is_over(answer: Answer, now_s: float) -> bool:
    """Tell if the time to live that an answer tells is over; it may have become longer since."""
    return isinstance(answer, float) and answer <= now_s


class RemoteView:
    """Answers of a remote tier by chunk. Has no clock: the caller passes the time, on the clock of the chunks' ends.

    Args:
        hold_s: validity of an answer.

    Attributes:
        heard: the trails of chunks that the tier named.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self.heard = RemoteTrails()
        self._answers: OrderedDict[ChunkRef, _Answer] = OrderedDict()  # oldest first
        self._asked_trails: OrderedDict[bytes, float] = OrderedDict()  # when they may be asked again
        self._serial = 0  # counts the events that void earlier answers
        self._void: OrderedDict[Asked, int] = OrderedDict()  # answers about an item before this serial are void
        self._void_all = 0  # so are all answers from before this one

    @property
    def serial(self) -> int:
        """The age of a question. Its answer is void if the serial of its chunk has advanced since."""
        return self._serial

    def note(self, asked: Iterable[Asked], answers: Iterable[Answer], now_s: float, since: int | None = None) -> None:
        """Note answers of the tier, or what its behaviour showed; None stands for no answer.

        An answer to a question asked at serial ``since`` counts unless it has become void meanwhile. The trails it
        names stay true; only the presence of their chunks becomes void.
        """
        known, expires_s = self._answers, now_s + self._hold_s
        said = {presence: _Answer(presence, expires_s) for presence in (True, False)}  # so that most share two objects
        for item, answer in zip(asked, answers, strict=True):
            if isinstance(item, bytes):
                if since is None or not self.is_void(item, since):
                    self._note_trail(item, answer, expires_s)
            elif self._hold_s and answer is not None and (since is None or not self.is_void(item, since)):
                known[item] = _Answer(answer, expires_s) if isinstance(answer, float) else said[answer is True]
                known.move_to_end(item)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _note_trail(self, trail: bytes, answer: Answer, expires_s: float) -> None:
        if not isinstance(answer, tuple):
            return
        self.heard.add(trail, answer)
        if self._hold_s:
            self._asked_trails[trail] = expires_s
            self._asked_trails.move_to_end(trail)
            while len(self._asked_trails) > MAX_TRAILS:
                self._asked_trails.popitem(last=False)

    def tell(self, told: RemoteAnswers, answers: Mapping[Asked, Answer], now_s: float, since: int) -> None:
        """Record answers to a question asked at serial ``since`` for a request.

        They count for at least a second, as vLLM may ask again until it has free blocks.
        """
        for item, answer in answers.items():
            if not isinstance(item, bytes):
                if answer is False:  # no tier or engine asked for this request has it
                    self.heard.forget(item)
            elif isinstance(answer, tuple):
                self.heard.add(item, answer)
        told.note(answers, now_s, now_s + max(self._hold_s, MIN_TOLD_S), since)

    def is_void(self, item: Asked, since: int) -> bool:
        """Tell if an answer to a question asked at serial ``since`` no longer counts."""
        return self._void_since(item) > since

    def deny(self, refs: Sequence[ChunkRef], now_s: float) -> None:
        """Note that chunks are missing in the tier, or must not be read there, regardless of earlier answers."""
        self._make_void(refs)
        self.note(refs, [False] * len(refs), now_s)

    def holds(self, ref: ChunkRef, now_s: float, told: RemoteAnswers = NO_ANSWERS) -> bool | None:
        """Tell if the tier has the chunk, as far as the view or the request knows; None if it must be asked."""
        is_there = self._is_there(ref, now_s)
        if is_there:
            return True
        own = told.holds(ref, now_s, self._void_since(ref))
        return is_there if own is None and not told.source else own

    def _is_there(self, ref: ChunkRef, now_s: float) -> bool | None:
        answer = self._answers.get(ref)
        if answer is None:
            return None
        if answer.expires_s <= now_s or _is_over(answer.presence, now_s):
            del self._answers[ref]
            return None
        return bool(answer.presence)

    def until_s(self, ref: ChunkRef, now_s: float, told: RemoteAnswers = NO_ANSWERS) -> float | None:
        """Return the end of the time to live of a chunk that ``holds`` says is there; None for no end."""
        is_there = self._is_there(ref, now_s)
        return end_of(self._answers[ref].presence) if is_there else told.until_s(ref, now_s)

    def unknown(self, asked: Iterable[Item], now_s: float, told: RemoteAnswers = NO_ANSWERS) -> list[Item]:
        """Return the chunks and trails about which the tier must be asked for a request."""
        return [item for item in asked if self._is_unknown(item, now_s, told)]

    def _is_unknown(self, item: Asked, now_s: float, told: RemoteAnswers) -> bool:
        if not isinstance(item, bytes):
            return self.holds(item, now_s, told) is None
        is_known = not told.source and self._asked_trails.get(item, 0.0) > now_s
        return not is_known and not told.was_asked(item, now_s)

    def forget(self, refs: Sequence[ChunkRef]) -> None:
        """Drop the answers about chunks, including those given to single requests."""
        self._make_void(refs)
        for ref in refs:
            self._answers.pop(ref, None)

    def forget_missing(self, refs: Iterable[ChunkRef]) -> None:
        """Drop the negative answers about chunks that are on their way."""
        for ref in refs:
            answer = self._answers.get(ref)
            if answer is not None and not answer.presence:
                del self._answers[ref]

    def clear(self) -> None:
        """Drop all answers."""
        self._serial += 1
        self._void_all = self._serial
        self._void.clear()
        self._answers.clear()
        self._asked_trails.clear()
        self.heard.clear()

    def _void_since(self, item: Asked) -> int:
        return max(self._void.get(item, 0), self._void_all)

    def _make_void(self, refs: Iterable[ChunkRef]) -> None:
        self._serial += 1
        for ref in refs:
            self._void[ref] = self._serial
            self._void.move_to_end(ref)
        while len(self._void) > MAX_ANSWERS:
            self._void.popitem(last=False)
