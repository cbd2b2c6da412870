"""Keys of saving and loading: what is stored and loaded, how a step waits for it, and what a request may set."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from kvstore.config.keys.base import Keys, Seconds, Switch, Tokens, Unit, as_tuple

_SAFE_FIELDS: Final = ("skip_save", "skip_load", "max_save_tokens", "ttl", "tag", "demote", "drop")
REQUEST_FIELDS: Final = (*_SAFE_FIELDS, "retain", "prefetch", "pin")  # these take room
"""Fields that a client may set for one request, if the operator allows it."""
_MOST_S: Final = 365 * 86_400


def _read_bit(value: object) -> object:
    return bool(value) if value in (0, 1) else value


class RequestKeys(Keys):
    """Saving, loading, and the fields of a request."""

    save_decode_cache: bool = False
    """Store the KV of generated tokens too."""
    save_unfull_chunk: bool = True
    """Store the tail of a prompt that does not fill a chunk, up to its last whole block."""
    discard_partial_chunks: bool = False
    """LMCache's other name for `save_unfull_chunk: false`; either suffices. Also read without a prefix from vLLM's
    extra config."""
    skip_last_n_tokens: Tokens = 0
    """Tokens at a sequence's end that are neither stored nor loaded, such as a chat template's end, which the next turn
    replaces. Also read without a prefix from vLLM's extra config."""
    priority_limit: int | None = None
    """Requests whose vLLM priority is a larger number, so less urgent, are loaded but not stored."""
    force_skip_save: Annotated[bool, BeforeValidator(_read_bit)] = False
    """Store nothing; what is stored is still loaded. Meant for the variable `KVSTORE_FORCE_SKIP_SAVE`, which may also
    be 1 or 0."""
    request_fields: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = _SAFE_FIELDS
    """[Fields of requests](per-request.md) that count, of `skip_save`, `skip_load`, `max_save_tokens`, `ttl`, `tag`,
    `demote`, `drop`, `retain`, `prefetch` and `pin`: a list, or text with commas. With `pin`, any client may keep up to
    half of the pool."""
    pin_max_secs: Annotated[float, Unit("seconds"), Field(gt=0, le=_MOST_S)] = 86_400.0
    """Duration of a pin, unless it is renewed."""
    retain_max_secs: Annotated[float, Unit("seconds"), Field(gt=0, le=_MOST_S)] = 86_400.0
    """Longest time for which requests may retain chunks on disk; longer ones are cut."""
    retain_share: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """Share of `max_local_disk_size` that requests of one salt and tags may retain; all together at most half."""
    min_retrieve_tokens: Tokens = 0
    """A shorter hit is computed instead of loaded."""
    max_tokens_per_load: Tokens = 0
    """A longer hit is cut to this, in whole blocks; the rest is computed. 0 for no limit."""
    enable_async_loading: Switch = None
    """Let a request wait for its load while others go on computing. If null or `auto`: yes from disk or a remote
    tier, and for a long load from memory if other requests run; else the step waits. If false, a slower tier needs
    vLLM's `--no-async-scheduling`. Always yes where several workers send what they compute to a remote tier or another
    engine."""
    enable_async_saving: Switch = None
    """Copy a step's KV to memory while the next step runs; vLLM keeps the blocks until then. If null or `auto`: yes on
    a GPU, no on a CPU."""
    use_layerwise: bool = False
    """Load and store layer by layer while the model runs, for what a step waits for. vLLM then captures only piecewise
    CUDA graphs. Not used with speculative decoding."""
    load_only_if_faster: bool = True
    """Compute a hit if loading it would take longer, as measured while running."""
    verify_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the hits that are computed anyway, to [compare](operations.md#verifying) with what is stored."""
    blocking_timeout_secs: Seconds = Field(default=10.0, gt=0)
    """Longest wait for a read from a slower tier, or a flush. Closing flushes, and may take as long again."""

    @property
    def saves_tails(self) -> bool:
        """True if the end of a prompt that does not fill a chunk is stored."""
        return self.save_unfull_chunk and not self.discard_partial_chunks

    @field_validator("request_fields")
    @classmethod
    def _known_fields(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not set(value) <= set(REQUEST_FIELDS):
            raise PydanticCustomError("fields", "must be some of {known}", {"known": ", ".join(REQUEST_FIELDS)})
        return value
