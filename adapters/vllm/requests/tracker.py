"""State that the scheduler side keeps of a request between steps. The names are those of LMCache's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.adapters.vllm.telemetry.announcer import Described
from kvstore.adapters.vllm.telemetry.stats import RequestStats
from kvstore.index.plans import Match
from kvstore.index.remote_view import NO_ANSWERS, RemoteAnswers
from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import KeyExtras, PrefixHasher, PrefixKey


class RequestView(Described, Protocol):
    """The parts of vLLM's ``Request`` that tracking needs; they change as the request runs."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    priority: int

    @property
    def cache_salt(self) -> str | None:
        """Requests share blocks in vLLM's own prefix cache only within one salt."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was sampled."""


@dataclass(frozen=True)
class LoadSpec:
    """Promise of a lookup: ``match`` beyond the ``num_local_tokens`` that vLLM's own prefix cache has.

    With ``async_load`` the request waits for its load, else the step does. ``told`` is the remote tier's answer.
    """

    match: Match
    num_local_tokens: int
    num_external_tokens: int
    told: RemoteAnswers = NO_ANSWERS
    async_load: bool = False


@dataclass(frozen=True)
class SaveSpec:
    """Chunks whose KV is complete after the coming step, and the keys of the chunks before them.

    ``first_block`` is the position, among the request's blocks, of the first chunk's first block. At ``marks``, in
    tokens, a checkpoint is worth more than elsewhere.
    """

    refs: list[ChunkRef]
    prefix: Sequence[PrefixKey]
    first_block: int
    marks: tuple[int, ...] = ()

    def first_blocks(self) -> dict[ChunkRef, int]:
        """Return the position of each chunk's first block among the request's blocks."""
        ends = accumulate((ref.num_blocks for ref in self.refs), initial=self.first_block)
        return dict(zip(self.refs, ends, strict=False))


class WaitsFor(NamedTuple):
    """A chunk that another request's load brings, with the arguments of the lookup that decided to wait for it."""

    key: PrefixKey
    num_tokens: int
    num_local_tokens: int


@dataclass(frozen=True)
class SaveRules:
    """Rules for storing parts of a request; the last ``skip_last_tokens`` of a sequence are not stored.

    Where hits end at checkpoints, ``spares_last_token`` ends a prompt before its last token, which is computed in any
    case. With ``marks_decode`` a checkpoint is worth keeping at the end of each decoded chunk until the next one,
    because it is too late for a checkpoint when a request ends. If the KV of a token depends on the next
    ``lookahead_tokens``, too, as in the draft layers of EAGLE and MTP, a hit ends as many tokens before its last chunk.
    """

    block_tokens: int
    chunk_tokens: int
    save_decode: bool
    save_tails: bool
    skip_last_tokens: int = 0
    spares_last_token: bool = False
    marks_decode: bool = False
    lookahead_tokens: int = 0


@dataclass
class RequestTracker:
    """One request, from its arrival until it is finished."""

    request: RequestView
    extras: KeyExtras
    rules: SaveRules
    params: RequestParams = NO_PARAMS
    saves: bool = True
    hasher: PrefixHasher = field(init=False)
    pin_name: str = ""  # the lease on its prompt, if the client asked to begin or to end one
    load: LoadSpec | None = None
    load_failed: bool = False  # an asynchronous one: the request must compute before it is offered a hit again
    waits_for: WaitsFor | None = None
    is_handed_over: bool = False  # another engine computes its prompt for this one
    parted_tokens: int = 0  # up to here its chunks were found, and no checkpoint
    decoded: tuple[ChunkRef, ...] = ()  # the last checkpoint behind its prompt
    checkpoint_tokens: int = 0  # the token of the last checkpoint stored of it
    num_saved_chunks: int = 0
    prompt_saved: bool = False
    noted: set[PrefixKey] = field(default_factory=set)  # chunks whose use by this request the index has counted
    stats: RequestStats = field(default_factory=RequestStats)
    _local_hasher: PrefixHasher | None = None

    def __post_init__(self) -> None:
        self.hasher = PrefixHasher(self.rules.chunk_tokens, self.rules.block_tokens, self.extras)

    def local_hasher(self) -> PrefixHasher:
        """Return a hasher whose keys are equal wherever vLLM's own prefix cache shares blocks.

        vLLM's cache ignores tags and the content of an adapter's files: one request may have been looked up under
        their fingerprint, and another served without the cache because they took too long to read. A probe replaces
        the salt in our keys only.
        """
        adapter = self.extras.lora
        if not self.extras.tags and adapter is None and not self.params.probe:
            return self.hasher
        if self._local_hasher is None:
            salt = self.request.cache_salt if self.params.probe else self.extras.cache_salt
            named = (adapter[0], "") if adapter is not None else None
            extras = replace(self.extras, cache_salt=salt, tags=(), lora=named)
            self._local_hasher = PrefixHasher(self.rules.chunk_tokens, self.rules.block_tokens, extras)
        self._local_hasher.update(self.request.all_token_ids)
        return self._local_hasher

    @property
    def is_saved(self) -> bool:
        """True if no further step can complete a chunk to store."""
        return not self.saves or (self.prompt_saved and not self.rules.save_decode)

    def restart_saving(self) -> None:
        """Offer all chunks again; those that are stored by then are left out."""
        self.num_saved_chunks = 0
        self.prompt_saved = False

    def take_save(self, num_scheduled_tokens: int) -> SaveSpec | None:
        """Return the chunks that the coming step of ``num_scheduled_tokens`` completes, each once.

        Only known tokens count: with asynchronous scheduling and speculation a step may run ahead of them, and what it
        computes there may be rejected.
        """
        written_tokens = self.request.num_computed_tokens + num_scheduled_tokens
        prompt_tokens = self._prompt_tokens
        known_tokens = self._storable(self.request.num_tokens) if self.rules.save_decode else prompt_tokens
        limit_tokens = min(known_tokens, written_tokens)
        # The end of its last whole block: the tail ends there, and a state left there is gone with the next step.
        ends_tokens = prompt_tokens - prompt_tokens % self.rules.block_tokens
        prompt_ends = not self.prompt_saved and written_tokens >= ends_tokens
        if prompt_ends and self.rules.spares_last_token:
            limit_tokens = min(limit_tokens, prompt_tokens)  # the tail first, with its checkpoint
        if limit_tokens // self.rules.chunk_tokens <= self.num_saved_chunks and not prompt_ends:
            return None
        self.prompt_saved |= prompt_ends
        return self._save_up_to(limit_tokens, prompt_tokens if prompt_ends else 0)

    def take_final_save(self) -> SaveSpec | None:
        """Return the chunks left to store of a request that has ended: its last whole chunks and its tail."""
        if not self.saves or not self.rules.save_decode:
            return None
        limit_tokens = min(self._storable(self.request.num_tokens), self.request.num_computed_tokens)
        return self._save_up_to(limit_tokens, limit_tokens)

    @property
    def _prompt_tokens(self) -> int:
        """Number of the prompt's tokens that are stored."""
        return self._storable(self.request.num_prompt_tokens - self.rules.spares_last_token)

    def _storable(self, num_tokens: int) -> int:
        """Return how many of a sequence's tokens may be stored."""
        kept_tokens = max(0, num_tokens - self.rules.skip_last_tokens)
        most_tokens = self.params.max_save_tokens
        return kept_tokens if most_tokens is None else min(kept_tokens, most_tokens)

    def _save_up_to(self, limit_tokens: int, tail_tokens: int) -> SaveSpec | None:
        """Return whole chunks below ``limit_tokens`` not yet taken, and any tail that ends at ``tail_tokens``."""
        self.hasher.update(self.request.all_token_ids)
        first = self.num_saved_chunks
        self.num_saved_chunks = max(first, limit_tokens // self.rules.chunk_tokens)
        save = chunks_of(self.hasher, self.rules, first, limit_tokens, tail_tokens if self.rules.save_tails else 0)
        ends_tokens = (tail_tokens, self._prompt_tokens)
        piece_tokens = self.rules.block_tokens if self.rules.save_tails else self.rules.chunk_tokens
        marks = [self.parted_tokens, *(end_tokens - end_tokens % piece_tokens for end_tokens in ends_tokens)]
        if self.rules.marks_decode and limit_tokens > self.request.num_prompt_tokens:
            marks.append(limit_tokens - limit_tokens % self.rules.chunk_tokens)
        return replace(save, marks=tuple(marks)) if save is not None else None


def chunks_of(
    hasher: PrefixHasher, rules: SaveRules, first_chunk: int, limit_tokens: int, tail_tokens: int
) -> SaveSpec | None:
    """Return whole chunks below ``limit_tokens`` from a first one on, and any tail that ends at ``tail_tokens``."""
    last = limit_tokens // rules.chunk_tokens
    first = min(first_chunk, last)  # a resumed request may have less than it had before
    blocks_per_chunk = rules.chunk_tokens // rules.block_tokens
    refs = [ChunkRef(key, blocks_per_chunk) for key in hasher.chunk_keys()[first:last]]
    tail_blocks = (tail_tokens - last * rules.chunk_tokens) // rules.block_tokens
    if tail_blocks > 0:
        refs.append(ChunkRef(hasher.block_keys(last)[tail_blocks - 1], tail_blocks))
    return SaveSpec(refs, hasher.chunk_keys()[:first], first * blocks_per_chunk) if refs else None
