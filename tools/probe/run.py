"""Implementation of ``kvstore probe``, which sends a random prompt twice to a running vLLM and reports the hits.

vLLM's prefix cache, which answers a repeated prompt before the store is asked, includes the request's ``cache_salt`` in
its keys. The two requests have different salts but the same ``kvstore.probe``, which replaces the salt in the store's
keys. So the first request is computed, and the second one finds the first one's chunks in the store. The probe changes
nothing for other requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

try:
    import httpx
except ImportError as error:
    raise ImportError("probe needs httpx: pip install 'vllm-kvstore[warm]'") from error

from kvstore.model.errors import ConfigError, TierError
from kvstore.tools.probe.counters import Counters, Seen, read_counters
from kvstore.tools.probe.reasons import NO_METRICS, NOT_ALONE, why_never, why_not
from kvstore.tools.probe.settling import let_it_store, made_up, nudge
from kvstore.tools.vllmclient import client_of, events

_RESERVED_TOKENS: Final = 8  # of the model's length, for the answer and for tokens that a server adds


@dataclass
class ProbeReport:
    """Result of a probe.

    Attributes:
        model: name of the probed model.
        prompt_tokens: length of the prompt.
        cold_ttft_s: seconds to the first token of the first request; None if it was not sent.
        warm_ttft_s: seconds to the first token of the second request; None if it was not sent.
        found_tokens: tokens that the store supplied to the second request.
        tiers: found tokens by tier, if known.
        reason: why nothing was found; empty if tokens were found.
        remedy: remedy of the reason.
        notes: caveats about these numbers.
    """

    model: str
    prompt_tokens: int
    cold_ttft_s: float | None = None
    warm_ttft_s: float | None = None
    found_tokens: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""
    notes: list[str] = field(default_factory=list)


def probe(url: str, *, tokens: int, model: str | None, api_key: str | None, timeout_s: float) -> ProbeReport:
    """Send a random prompt twice, and report the tokens that the store supplied to the second request.

    Args:
        url: the server's address, such as ``http://127.0.0.1:8000``.
        tokens: length of the prompt, which is reduced to the model's limit.
        model: the server's name of the model; None for the first one.
        api_key: the server's API key; None if it needs none.
        timeout_s: timeout of each answer.

    Raises:
        ConfigError: the URL is wrong, or the server refuses the key, the model or the prompt.
        TierError: no vLLM answers at the URL.
    """
    if tokens < 1:
        raise ConfigError(f"--tokens is {tokens}: it must be at least 1")
    with _said_plainly(url, timeout_s), client_of(url, timeout_s, api_key=api_key) as client:
        report = _begin(client, url, model, tokens)
        before = read_counters(client)
        if before is not None and before.has_any and (never := why_never(before)):
            report.reason, report.remedy = never
        else:
            _ask_twice(client, report, before)
        return report


def _begin(client: httpx.Client, url: str, model: str | None, tokens: int) -> ProbeReport:
    """Choose the model and the length of the prompt, and return a new report.

    Raises:
        ConfigError: the model is not served.
    """
    models = {entry["id"]: entry for entry in client.get("/v1/models").raise_for_status().json()["data"]}
    if not models:
        raise ConfigError(f"the server at {url} serves no model")
    model = model or next(iter(models))
    if model not in models:
        raise ConfigError(f"--model is {model!r}: the server at {url} serves {', '.join(models)}")
    most = models[model].get("max_model_len")
    report = ProbeReport(model, tokens)
    if isinstance(most, int) and tokens > most - _RESERVED_TOKENS:
        report.prompt_tokens = max(1, most - _RESERVED_TOKENS)
        report.notes.append(f"the prompt has {report.prompt_tokens:,} tokens: the model takes {most:,}")
    return report


def _ask_twice(client: httpx.Client, report: ProbeReport, before: Counters | None) -> None:
    prompt, name = made_up(report.prompt_tokens), secrets.token_hex(16)
    num_engines = before.num_engines if before is not None else 1
    engine = {"X-data-parallel-rank": "0"} if num_engines > 1 else {}
    if engine:
        report.notes.append(f"both requests went to the first of {num_engines} engines")
    cold = _send(client, report.model, prompt, name, engine)
    between = let_it_store(client, report.model, engine)
    warm = _send(client, report.model, prompt, name, engine)
    nudge(client, report.model, engine)
    seen = Seen.of(before, between, read_counters(client))
    report.cold_ttft_s, report.warm_ttft_s = cold.ttft_s, warm.ttft_s
    report.found_tokens = warm.cached_tokens or 0
    if seen is None or not seen.after.has_any:
        report.notes.append("the server shows no metrics, so nothing is known of tiers")
        if not report.found_tokens:
            report.reason, report.remedy = NO_METRICS
        return
    report.tiers = seen.tiers
    if seen.others(own=2):
        report.notes.append("other requests came at the same time: what is said of tiers and reasons may be theirs")
    if warm.cached_tokens is None and seen.others(own=2):
        report.reason, report.remedy = NOT_ALONE
        return
    if warm.cached_tokens is None:
        report.found_tokens = min(sum(seen.tiers.values()), report.prompt_tokens)
    if not report.found_tokens:
        report.reason, report.remedy = why_not(seen)


@dataclass(frozen=True)
class _Sent:
    ttft_s: float
    cached_tokens: int | None  # None if the server does not say


def _send(client: httpx.Client, model: str, prompt: list[int], name: str, engine: Mapping[str, str]) -> _Sent:
    """Request one token, with a new random salt."""
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "stream_options": {"include_usage": True},
        "cache_salt": secrets.token_hex(16),
        "kv_transfer_params": {"kvstore.probe": name},
    }
    first_s, cached_tokens = 0.0, None
    for seconds, event in events(client, request, engine):
        if "error" in event:
            raise ConfigError(f"the server refuses the prompt: {_text_of(event)}")
        first_s = first_s or (seconds if event.get("choices") else 0.0)
        details = (event.get("usage") or {}).get("prompt_tokens_details")
        cached_tokens = details.get("cached_tokens") if details else cached_tokens
    return _Sent(first_s, cached_tokens)


@contextmanager
def _said_plainly(url: str, timeout_s: float) -> Iterator[None]:
    """Convert errors of requests to errors with a remedy.

    Raises:
        ConfigError: the URL is wrong, or the server refuses a request.
        TierError: the server does not answer, or not as vLLM does.
    """
    try:
        yield
    except httpx.HTTPStatusError as error:
        answer = error.response
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"the server at {url} refuses ({answer.status_code}): give its key with --api-key"
            ) from error
        answer.read()
        raise ConfigError(f"the server at {url} answers {answer.status_code}: {answer.text[:300]}") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url is {url!r}: it must be http://HOST:PORT") from error
    except httpx.TimeoutException as error:
        raise TierError(
            f"no answer from {url} within {timeout_s:.0f} s: is it busy? Allow more with --timeout-s"
        ) from error
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise TierError(f"no vLLM answers at {url} ({error!r}): is it running, and is this its port?") from error


def _text_of(event: Mapping[str, Any]) -> str:
    found = event["error"]
    return str(found.get("message", found) if isinstance(found, Mapping) else found)[:300]
