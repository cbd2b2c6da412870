"""Verdict on a miss: the event that explains it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from kvstore.index.plans import MissReason
from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.tools.why.advice import (
    OF_REASON,
    PLACES,
    Meaning,
    of_event,
    size_advice,
    why_not_loading,
    why_not_storing,
)
from kvstore.tools.why.reading import Found, Story

_SHOWN: Final = 8  # events
_BY_HISTORY: Final = {
    reason.value for reason in (MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.REMOVED, MissReason.LOST)
}
"""Reasons that the history tells in more detail. The engine forgets them after a while, and the trace does not."""
_KEPT: Final = {Fate.STORED, Fate.READ, Fate.WRITTEN}
_VERBS: Final = {
    Fate.STORED: "stored in memory",
    Fate.READ: "read to memory from {place}",
    Fate.WRITTEN: "written to {place}",
    Fate.REFUSED: "not taken by {place}",
    Fate.FAILED: "failed to be written to {place}",
    Fate.EVICTED: "evicted from {place}",
    Fate.EXPIRED: "ended with its time to live",
    Fate.REMOVED: "removed from {place}",
    Fate.LOST: "found missing or damaged in {place}",
    Fate.UNREAD: "not read from {place}: the tier failed",
}


@dataclass
class Verdict:
    """Explanation of a request's miss.

    Attributes:
        reason: the reason counted by the engine, or a better one from the history; empty if nothing was missed.
        because: the explanation.
        advice: what to do; empty if nothing was missed.
        history: what happened to the chunk, one line each.
    """

    reason: str
    because: str
    advice: str = ""
    history: Sequence[str] = ()


def judge(story: Story) -> Verdict:
    """Return the verdict on a request: why its load failed, if it had a hit, and why no more was found."""
    missed, failed = _judge_miss(story), story.failed_loads
    if not (failed and story.found.lookup.hit_tokens):
        return missed
    meaning = of_event(failed[-1])
    because = f"{len({event.key for event in failed})} chunk(s) of its hit were computed after all: {meaning.because}"
    if not missed.reason:
        return Verdict("load_failed", because, meaning.advice)
    return replace(missed, because=f"{missed.because}; also, {because}")


def _judge_miss(story: Story) -> Verdict:
    """Return the verdict on what a request did not find."""
    lookup = story.found.lookup
    if not lookup.reason:
        return Verdict("", "nothing was missed: all that can be stored of it was found, or was in vLLM's own cache")
    if lookup.reason == MissReason.SWITCHED_OFF.value:
        meaning = why_not_loading(tuple(lookup.notes)) or OF_REASON[MissReason.SWITCHED_OFF]
        return Verdict(lookup.reason, meaning.because, meaning.advice)
    events = _history(story)
    history = tuple(_lines(story, events))
    if lookup.reason not in _BY_HISTORY:
        known = {reason.value: meaning for reason, meaning in OF_REASON.items()}
        meaning = known.get(lookup.reason, Meaning(lookup.reason, ""))
        return Verdict(lookup.reason, meaning.because, meaning.advice, history)
    if "remote_late" in lookup.notes:
        because = "the remote tier did not answer within lookup_timeout_ms, and may have it"
        return Verdict("remote_late", because, "raise lookup_timeout_ms, or look at the remote tier", history)
    decisive = _decisive(story, events)
    if decisive is not None:
        return _by_event(story, events, *decisive, history)
    return _never_stored(story, events, history)


def _history(story: Story) -> list[tuple[float, ChunkEvent]]:
    """Return the events of the chunk that would have brought most of what is missing, and of all chunks.

    An event of all chunks counts only if the chunk was kept then.
    """
    missing = {key: position for position, key in enumerate(story.found.lookup.missing)}
    keys = dict.fromkeys(event.key for _, event in story.events if event.key)
    chosen = max(keys, key=lambda key: missing.get(key, -1), default=None)
    found: list[tuple[float, ChunkEvent]] = []
    is_kept = False
    for time_s, event in story.events:
        if event.key == chosen and chosen is not None:
            is_kept = event.fate in _KEPT or (is_kept and event.fate in {Fate.REFUSED, Fate.FAILED, Fate.UNREAD})
            found.append((time_s, event))
        elif not event.key and is_kept:
            is_kept = False
            found.append((time_s, event))
    return found


def _decisive(story: Story, events: Sequence[tuple[float, ChunkEvent]]) -> tuple[float, ChunkEvent] | None:
    """Return the event by which the chunk was lost; None if the last one kept it."""
    if not events:
        return None
    if events[-1][1].fate not in _KEPT:
        return events[-1]
    only_stages = story.tiers is not None and not story.tiers.keeps_in_memory
    below = _not_below(events) if only_stages else None
    return next((one for one in reversed(events) if one[1] is below), None)


def _by_event(
    story: Story,
    events: Sequence[tuple[float, ChunkEvent]],
    time_s: float,
    event: ChunkEvent,
    history: Sequence[str],
) -> Verdict:
    """Return the verdict if the last event of a chunk tells how it was lost."""
    meaning = of_event(event)
    if event.fate is not Fate.EVICTED:
        return Verdict(event.fate.value, f"{_ago(story, time_s)}, {meaning.because}", meaning.advice, history)
    place = PLACES.get(event.place, event.place)
    because = f"{_ago(story, time_s)}, it was evicted from {place} in favour of {_maker(story, event)}"
    below = _not_below(events)
    if below is not None:
        because += f"; before, {of_event(below).because}"
    advice = size_advice(story.tiers, story.num_since, event.place)
    if any(place == "remote" for place in _written(events)):
        because += "; the remote tier had it once, and has evicted or removed it"
        advice += ", and make the remote tier larger"
    elif below is not None:
        advice += f"; {of_event(below).advice}"
    return Verdict(event.fate.value, because, advice, history)


def _not_below(events: Sequence[tuple[float, ChunkEvent]]) -> ChunkEvent | None:
    """Return the last event by which a slower tier did not take a chunk; None if it did, or was not offered it."""
    for _, event in reversed(events):
        if event.fate is Fate.WRITTEN:
            return None
        if event.fate in {Fate.REFUSED, Fate.FAILED} and event.place in {"disk", "remote"}:
            return event
    return None


def _written(events: Sequence[tuple[float, ChunkEvent]]) -> Iterator[str]:
    return (event.place for _, event in events if event.fate is Fate.WRITTEN)


def _maker(story: Story, event: ChunkEvent) -> str:
    name = story.makers.get(event.newcomer, "")
    if name == story.found.lookup.request_id:
        return "a chunk of the same request"
    if name:
        return f"a chunk of request {name}"
    return "a chunk that was stored" if event.newcomer else "chunks on their way between tiers"


def _never_stored(story: Story, events: Sequence[tuple[float, ChunkEvent]], history: Sequence[str]) -> Verdict:
    """Return the verdict if no event tells how the chunk was lost."""
    lookup, reason = story.found.lookup, story.found.lookup.reason
    if events:
        if "remote" in _written(events):
            because = "the remote tier had it, and has evicted or removed it, or another engine has cleared it"
            return Verdict(reason, because, "make the remote tier larger; kvstore explain asks a cache server", history)
        known = {one.value: meaning for one, meaning in OF_REASON.items()}
        meaning = known.get(reason, Meaning("it was there, and could not be found at that moment", "try again"))
        return Verdict(reason, meaning.because, meaning.advice, history)
    if story.owner is not None:
        notes = story.notes.get(story.owner.request_id, ())
        meaning = why_not_storing(notes) or Meaning(
            "it was not offered for storing: it may be of an answer (save_decode_cache), or below a block",
            "see save_decode_cache, save_unfull_chunk and skip_last_n_tokens",
        )
        earlier = f"request {story.owner.request_id} had the same tokens {_ago(story, story.owner.time_s)}"
        because = f"{earlier}, but {meaning.because}"
        return Verdict("not_stored", because, meaning.advice, history)
    if reason != MissReason.NEVER_STORED.value:
        meaning = {one.value: meaning for one, meaning in OF_REASON.items()}[reason]
        return Verdict(reason, meaning.because, meaning.advice, history)
    return Verdict(reason, _departure(story), _DEPARTED if story.nearest or lookup.found_tokens else _FIRST, history)


_FIRST: Final = "nothing, if it is the first of its kind; else look for a changing salt, adapter or date at its front"
_DEPARTED: Final = "nothing, if the prompts differ on purpose; else move what changes, such as a date or an id, behind"


def _departure(story: Story) -> str:
    """Return where a prompt leaves all that is known."""
    found_tokens, chunk_tokens = story.found.lookup.found_tokens, story.found.begin.chunk_tokens
    if story.nearest is not None:
        common_tokens = max(story.nearest.num_chunks * chunk_tokens, found_tokens)
        end_tokens = (common_tokens // chunk_tokens + 1) * chunk_tokens
        return (
            f"no request of this trace had these tokens. The nearest, {story.nearest.request_id} "
            f"({_ago(story, story.nearest.time_s)}), has the first {common_tokens:,}, and differs or ends before token "
            f"{end_tokens:,}"
        )
    if found_tokens:
        return f"no request of this trace had these tokens. What is known ends with its first {found_tokens:,}"
    if not story.keys:
        return "no request of this trace began with these tokens, salt and adapter, and this one has not ended yet"
    return "no request of this trace began with these tokens, salt and adapter"


# -- words ------------------------------------------------------------------------------------------------------------


def clock(found: Found, time_s: float) -> str:
    """Format a time of a trace, in UTC as logs of several hosts are compared."""
    if not found.begin.start_s:
        return f"+{time_s:.3f} s"
    return datetime.fromtimestamp(found.begin.start_s + time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ago(story: Story, time_s: float) -> str:
    seconds = max(0.0, story.found.time_s - time_s)
    if seconds < 1:
        return "less than a second before"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit} before"
    return f"{seconds / 86_400:.0f} days before"


def _lines(story: Story, events: Sequence[tuple[float, ChunkEvent]]) -> Iterator[str]:
    if len(events) > _SHOWN:
        yield f"... {len(events) - _SHOWN:,} earlier"
    for time_s, event in events[-_SHOWN:]:
        verb = _VERBS[event.fate].format(place=PLACES.get(event.place, event.place))
        if event.fate is Fate.FAILED and event.place == "memory":
            verb = "failed to be stored in memory"
        if event.fate is Fate.EVICTED:
            verb += f" for {_maker(story, event)}"
        cause = f" ({event.cause.value})" if event.cause is not Cause.NONE else ""
        yield f"{clock(story.found, time_s)}  {verb}{cause}"
