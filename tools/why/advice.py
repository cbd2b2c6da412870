"""Sentences about misses: what a reason or an event means, and what to do about it."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from kvstore.index.plans import MissReason
from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.policies.traces import Tiers

GIB_BYTES: Final = 1 << 30
PLACES: Final = {"memory": "memory", "disk": "the disk", "remote": "the remote tier", "": "every place"}


class Meaning(NamedTuple):
    """Explanation of a miss, and advice."""

    because: str
    advice: str


_LOG: Final = "look at vLLM's log of that time for lines that begin with kvstore:"
OF_REASON: Final = {
    MissReason.EVICTED: Meaning("it was evicted to make room for others", "raise max_local_cpu_size or add a disk"),
    MissReason.REMOVED: Meaning(
        "it was removed", "see docs/per-request.md for ttl and drop, and who calls POST /clear"
    ),
    MissReason.LOST: Meaning(
        "its bytes were missing or damaged when a load read them", "kvstore verify reads every chunk; check the disk"
    ),
    MissReason.NOT_YET: Meaning(
        "another request was computing, storing or loading it at the same time",
        "nothing; send requests with a common prompt one after the other if that matters",
    ),
    MissReason.TIER_DOWN: Meaning(
        "a tier that has it, or may have it, did not answer and was left out", f"run kvstore doctor, and {_LOG}"
    ),
    MissReason.NO_CHECKPOINT: Meaning(
        "it was there, without the checkpoint that this model needs to go on from it",
        "lower checkpoint_interval (docs/models.md)",
    ),
    MissReason.NO_ROOM: Meaning(
        "it was in a slower tier, and no slot of memory was free to load it through", "raise max_local_cpu_size"
    ),
    MissReason.TOO_SHORT: Meaning("the hit was shorter than min_retrieve_tokens", "lower min_retrieve_tokens"),
    MissReason.RECOMPUTE_FASTER: Meaning(
        "loading it would have taken longer than computing it",
        "use a faster tier; load_only_if_faster: false loads all",
    ),
    MissReason.NOT_TAKEN: Meaning(
        "vLLM took less than it was offered", "leave out what makes vLLM compute a prompt, such as prompt_logprobs"
    ),
    MissReason.VERIFIED: Meaning("it was a hit, and computed all the same to compare", "nothing: see verify_fraction"),
    MissReason.SWITCHED_OFF: Meaning("this request was not looked up", "see the notes of the request"),
}

OF_NOTE: Final = {
    "disabled": Meaning("the cache was switched off", "switch it on: POST /enable at the admin endpoint"),
    "engine_loads_nothing": Meaning("this engine loads nothing, by its kv_role", "set kv_role to kv_both"),
    "engine_saves_nothing": Meaning(
        "this engine stores nothing, by its kv_role or force_skip_save",
        "set kv_role to kv_both, without force_skip_save",
    ),
    "without_cache": Meaning(
        "it was served without the cache: one of its fields was wrong, or an adapter or image could not be identified",
        _LOG,
    ),
    "skip_load": Meaning("it asked not to load (skip_load)", "send it without skip_load"),
    "skip_save": Meaning("it asked not to be stored (skip_save)", "send it without skip_save"),
    "priority_limit": Meaning("its priority was above priority_limit, so it was not stored", "raise priority_limit"),
    "max_save_tokens": Meaning("it asked to store its front only (max_save_tokens)", "send it with more, or without"),
}
_NOT_LOADING: Final = ("disabled", "engine_loads_nothing", "without_cache", "skip_load")
_NOT_STORING: Final = (
    "disabled",
    "engine_saves_nothing",
    "without_cache",
    "skip_save",
    "priority_limit",
    "max_save_tokens",
)

_REFUSED: Final = {
    Cause.IN_USE: Meaning(
        "every slot of memory was in use by loads, writes, pins or the front of its own prompt",
        "raise max_local_cpu_size, or send less at once",
    ),
    Cause.POLICY: Meaning("what is in {place} was worth more to its policy", "raise {key}, or try another policy"),
    Cause.QUOTA: Meaning(
        "the quota of its salt or tag in {place} was full of chunks in use",
        "raise local_cpu_quotas or local_disk_quotas",
    ),
    Cause.QUEUE: Meaning("too many chunks were waiting to be written to {place}", "raise {queue}, or use a faster one"),
    Cause.FULL: Meaning(
        "{place} had no room left, or the quota of its tenant was used up",
        "make it larger; on a cache server raise server_quotas, on a Redis maxmemory",
    ),
    Cause.LIFETIME: Meaning(
        "it has a time to live, which {place} does not keep", "send it without a ttl, or use a tier that keeps them"
    ),
    Cause.UNWRITTEN: Meaning(
        "memory is for staging only (local_cpu: false), and no slower tier took it", "set local_cpu: true"
    ),
    Cause.LEAVING: Meaning("its former bytes were still being removed", "nothing: the next request stores it"),
}
_FAILED: Final = Meaning("it could not be written to {place}: the tier failed", f"{_LOG} and check {{place}}")
_FAILED_DOWN: Final = Meaning(
    "it could not be written to {place}: the tier failed repeatedly and was left out", f"{_LOG} and check {{place}}"
)
_FAILED_STORE: Final = Meaning(
    "its KV could not be copied to memory, or could not be trusted after a failed load", _LOG
)
_REMOVED: Final = {
    Cause.CLEARED: Meaning("an operator removed all chunks (POST /clear)", "nothing"),
    Cause.RESET: Meaning("all chunks were removed, because the weights or the cache were reset", "nothing"),
    Cause.WRONG: Meaning("computing it again gave other bytes (verify_fraction)", "see docs/operations.md#verifying"),
    Cause.REPLACED: Meaning("a later checkpoint of the conversation replaced it", "lower checkpoint_interval"),
    Cause.NONE: Meaning("it was removed on request", "see docs/per-request.md: drop"),
}
_EXPIRED: Final = Meaning("its time to live was over", "send it with a longer ttl, or without")
_UNREAD: Final = Meaning("reading it from {place} failed", f"{_LOG} and check {{place}}")


def of_event(event: ChunkEvent) -> Meaning:
    """Return what an event by which a chunk was lost means."""
    if event.fate is Fate.EXPIRED:
        return _EXPIRED
    if event.fate is Fate.REMOVED:
        return _REMOVED.get(event.cause, _REMOVED[Cause.NONE])
    if event.fate is Fate.LOST:
        return OF_REASON[MissReason.LOST]
    if event.fate is Fate.EVICTED:
        return OF_REASON[MissReason.EVICTED]
    if event.fate is Fate.UNREAD:
        return _placed(_UNREAD, event.place)
    if event.fate is Fate.FAILED and event.place == "memory":
        return _FAILED_STORE
    if event.fate is Fate.FAILED:
        return _placed(_FAILED_DOWN if event.cause is Cause.DOWN else _FAILED, event.place)
    return _placed(_REFUSED.get(event.cause, Meaning("{place} did not take it", _LOG)), event.place)


def _placed(meaning: Meaning, place: str) -> Meaning:
    names = {
        "place": PLACES.get(place, place),
        "key": {"memory": "max_local_cpu_size", "disk": "max_local_disk_size"}.get(place, "its own size"),
        "queue": "max_write_queue" if place == "disk" else "max_remote_queue",
    }
    return Meaning(meaning.because.format(**names), meaning.advice.format(**names))


def why_not_loading(notes: tuple[str, ...]) -> Meaning | None:
    """Return why a request was not looked up, by its notes; None if they do not say."""
    return next((OF_NOTE[note] for note in _NOT_LOADING if note in notes), None)


def why_not_storing(notes: tuple[str, ...]) -> Meaning | None:
    """Return why a request was not stored, by its notes; None if they do not say."""
    return next((OF_NOTE[note] for note in _NOT_STORING if note in notes), None)


def size_advice(tiers: Tiers | None, num_chunks: int, place: str) -> str:
    """Return the size of a place that would have kept a chunk while ``num_chunks`` different ones were used."""
    if tiers is None:
        return OF_REASON[MissReason.EVICTED].advice
    if place == "disk" and tiers.chunk_bytes:
        key, now_bytes, need_bytes = "max_local_disk_size", tiers.disk_bytes, num_chunks * tiers.chunk_bytes
    else:
        key, now_bytes, need_bytes = "max_local_cpu_size", tiers.slots * tiers.slot_bytes, num_chunks * tiers.slot_bytes
    if need_bytes <= now_bytes:
        return f"raise {key}, or try another cache_policy: {num_chunks:,} chunks were used since, which would have fit"
    unless = "" if tiers.disk_bytes or tiers.has_remote or place == "disk" else ", or add local_disk"
    return (
        f"raise {key} from {_gib(now_bytes)} to {_gib(need_bytes)} GiB for each worker{unless}: {num_chunks:,} chunks "
        "were used in between"
    )


def _gib(num_bytes: float) -> str:
    """Format bytes in GiB, with three digits, rounded up."""
    gib = num_bytes / GIB_BYTES
    digits = max(0, 2 - math.floor(math.log10(gib))) if gib > 0 else 0
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f}"
