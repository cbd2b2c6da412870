"""Reasons why a prompt that was sent twice was not found the second time, with remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.adapters.vllm.flag import CONNECTOR_FLAG
from kvstore.index.plans import MissReason
from kvstore.tools.probe.counters import Counters, Seen


class Reason(NamedTuple):
    """Reason of a miss, and its remedy."""

    why: str
    remedy: str


NO_STORE: Final = Reason(
    "kvstore is not part of this vLLM: /metrics has none of its metrics", f"start vLLM with {CONNECTOR_FLAG}"
)
NO_METRICS: Final = Reason(
    "this vLLM shows no metrics, and does not say how much of a prompt was cached",
    "start vLLM without --disable-log-stats, or with --enable-prompt-tokens-details; then its log says whether kvstore "
    "is part of it",
)
NOT_ALONE: Final = Reason(
    "whose hits were counted cannot be told: other requests came at the same time",
    "try again at a quiet moment, or start vLLM with --enable-prompt-tokens-details: then each answer says it",
)
_OFF: Final = Reason(
    "the cache is switched off", "switch it on: curl -X POST 127.0.0.1:6999/enable (see docs/operations.md)"
)
_NOT_READY: Final = Reason(
    "kvstore keeps nothing: its workers run without the cache, or another connector answered the handshake first",
    "vLLM's log says why, in a line that begins with kvstore: and says WITHOUT or nothing is cached",
)
_REFUSED: Final = Reason(
    "the store refused the prompt's chunks: no slot of memory was free",
    "raise max_local_cpu_size, or send less at once: what is being written or loaded keeps its slot",
)
_FAILED: Final = Reason(
    "the prompt's chunks could not be stored", "look at vLLM's log for warnings that begin with kvstore:"
)
_NOTHING_STORED: Final = Reason(
    "nothing of the prompt was stored",
    "is it shorter than a block of vLLM's (or a chunk, with save_unfull_chunk: false)? Then raise --tokens. Otherwise "
    "look at kv_role (a kv_consumer stores nothing), force_skip_save and priority_limit",
)
_BY_REASON: Final = {
    MissReason.NEVER_STORED: Reason(
        "the prompt was stored, and not found under its keys",
        "does something in front of vLLM change requests, or spread them over several vLLMs that share nothing? Give "
        "them the same remote_url, or probe each",
    ),
    MissReason.EVICTED: Reason(
        "the prompt's chunks were evicted at once: memory is full of what is used more",
        "raise max_local_cpu_size; kvstore simulate says how much is enough",
    ),
    MissReason.REMOVED: Reason("the prompt's chunks were removed meanwhile", "did somebody clear the cache? Try again"),
    MissReason.LOST: Reason(
        "the prompt's chunks were lost: a tier returned them damaged, or not at all",
        "kvstore verify reads every chunk; see corrupt_chunks and failed_loads",
    ),
    MissReason.NOT_YET: Reason("the prompt was still being stored", "try again; if it stays so, the engine is busy"),
    MissReason.TIER_DOWN: Reason(
        "a tier does not answer, and is left out", "kvstore doctor --config kvstore.yaml says which, and why"
    ),
    MissReason.NO_CHECKPOINT: Reason(
        "the model needs a checkpoint to go on, and has none in this prompt", "see docs/models.md: try a longer prompt"
    ),
    MissReason.NO_ROOM: Reason(
        "the chunks are on a slower tier, and no slot of memory is free for their way", "raise max_local_cpu_size"
    ),
    MissReason.TOO_SHORT: Reason("the hit is shorter than min_retrieve_tokens", "raise --tokens above it"),
    MissReason.RECOMPUTE_FASTER: Reason(
        "it was found, and computing it is faster than loading it here",
        "nothing, for prompts as short as this one: try a larger --tokens; load_only_if_faster: false loads every hit",
    ),
    MissReason.NOT_TAKEN: Reason("vLLM took less than it was offered", "probe without other flags that read prompts"),
    MissReason.VERIFIED: Reason("it was found, and computed all the same, to compare", "nothing: see verify_fraction"),
    MissReason.SWITCHED_OFF: Reason(
        "this engine does not look up", "is it a kv_producer? Then probe its consumer. Or was the cache switched off?"
    ),
}


def why_not(seen: Seen) -> Reason:
    """Return the reason why the second request found nothing."""
    if missing := why_never(seen.after):
        return missing
    if not seen.grown("lookups_total"):
        return _NOT_READY
    if not seen.grown("stored_chunks_total"):
        if seen.grown("refused_chunks_total"):
            return _REFUSED
        return _FAILED if seen.grown("failed_stores_total") else _NOTHING_STORED
    return why_missed(seen.reasons)


def why_missed(reasons: Mapping[str, int]) -> Reason:
    """Return the most frequent reason of misses that are counted by reason."""
    known = {reason.value: reason for reason in MissReason}
    for name in sorted(reasons, key=reasons.__getitem__, reverse=True):
        if name in known:
            return _BY_REASON[known[name]]
    return _BY_REASON[MissReason.NEVER_STORED]


def why_never(counters: Counters) -> Reason | None:
    """Return the reason why no prompt can be found; None if there is none."""
    if not counters.has_any:
        return NO_METRICS
    if not counters.has_store:
        return NO_STORE
    return _OFF if counters.by_label("enabled").get("", 1.0) == 0 else None
