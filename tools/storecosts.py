"""Costs of an object store for ``kvstore calc --s3``: money by list prices, and the length at which a hit is faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.tools.calc import Sizes

PUT_USD: Final = 5.4e-6  # S3's standard class in Frankfurt, November 2026; other regions differ by some percent
GET_USD: Final = 0.43e-6
LIST_USD: Final = 5.4e-6
TB_MONTH_USD: Final = 24.5
FIRST_BYTE_S: Final = 0.03
_LOOKS_A_DAY: Final = 86_400 / 2.0
_FOLLOWERS: Final = 2  # of the log, a worker: itself, and its directory beside the scheduler


@dataclass(frozen=True)
class StoreCosts:
    """Costs for one prompt, of all workers together.

    Attributes:
        prompt_tokens: tokens of the prompt.
        requests: objects that its KV consists of, each of which is one request.
        size_bytes: of all of them.
        store_usd: to store it once.
        hit_usd: to load it once, in the same region.
        month_usd: to keep it for a month.
        log_day_usd: of one engine's looks at the log, a day.
        load_s: seconds to load it, first byte included.
        compute_s: seconds to compute it.
        pays_from_tokens: length from which on loading is faster; None if it never is.
    """

    prompt_tokens: int
    requests: int
    size_bytes: int
    store_usd: float
    hit_usd: float
    month_usd: float
    log_day_usd: float
    load_s: float
    compute_s: float
    pays_from_tokens: int | None


def store_costs(sizes: Sizes, *, load_gb_per_s: float, prefill_tokens_per_s: float) -> StoreCosts:
    """Return what a prompt costs in an object store.

    Args:
        sizes: of the model.
        load_gb_per_s: gigabytes a second that one worker loads, as ``kvstore bench`` measures.
        prefill_tokens_per_s: tokens a second that the engine computes.
    """
    prompt, workers = sizes.prompt, sizes.tp_size
    requests = workers * (prompt.chunks + prompt.checkpoints)
    size_bytes = workers * prompt.stored_bytes
    token_load_s = sizes.loaded_bytes_per_token / (load_gb_per_s * 1e9)  # workers load at the same time
    gain_s = 1 / prefill_tokens_per_s - token_load_s
    return StoreCosts(
        prompt_tokens=prompt.tokens,
        requests=requests,
        size_bytes=size_bytes,
        store_usd=requests * PUT_USD,
        hit_usd=requests * GET_USD,
        month_usd=size_bytes / 1e12 * TB_MONTH_USD,
        log_day_usd=_LOOKS_A_DAY * _FOLLOWERS * workers * (LIST_USD + GET_USD),
        load_s=FIRST_BYTE_S + prompt.loaded_bytes / (load_gb_per_s * 1e9),
        compute_s=prompt.tokens / prefill_tokens_per_s,
        pays_from_tokens=int(FIRST_BYTE_S / gain_s) + 1 if gain_s > 0 else None,
    )
