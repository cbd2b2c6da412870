"""Answers of ``kvstore why``: one request explained, or a table of those that missed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.policies.recorder import names_of
from kvstore.tools.console import Answer
from kvstore.tools.why.advice import OF_NOTE
from kvstore.tools.why.reading import Found, find_request, latest_misses, read_story
from kvstore.tools.why.verdict import Verdict, clock, judge

_TITLES = ("time", "tokens", "local", "hit", "missing from", "reason", "request")


def answer(words: Sequence[str], config: Path | None, most: int) -> Answer:
    """Explain a request, or list those that missed, of the trace that the words or the configuration name.

    Raises:
        ConfigError: no trace is named, it cannot be read or has no reasons, or it does not have this one request.
    """
    if len(words) > 2:
        raise ConfigError(f"{len(words)} arguments are given: name a request and a trace at most")
    *request, last = words or ("",)
    if len(words) == 2:
        return _explain(Path(last), request[0])
    if last and Path(last).is_file():
        return _list(Path(last), most)
    path = _configured(config, last)
    return _explain(path, last) if last else _list(path, most)


def _configured(config: Path | None, wanted: str) -> Path:
    """Return the latest trace of the configuration."""
    name = load_config(path=config, log_warnings=False).config.record_trace
    if name is None:
        about = f"{wanted} is no file, and " if wanted else ""
        raise ConfigError(
            f"{about}record_trace is not set here: name the trace, as in kvstore why REQUEST TRACE, or the "
            "configuration, as in kvstore why REQUEST --config kvstore.yaml"
        )
    path = Path(name).expanduser()
    *_, latest = path, *takewhile(Path.exists, names_of(path))
    return latest


def _explain(path: Path, request: str) -> Answer:
    story = read_story(path, find_request(path, request))
    verdict, lookup, found = judge(story), story.found.lookup, story.found
    tree: dict[str, object] = {
        "request": lookup.request_id,
        "time": clock(found, found.time_s),
        "tokens": lookup.num_tokens,
        "local_tokens": lookup.local_tokens,
        "hit_tokens": dict(lookup.hit_tokens),
        "found_tokens": lookup.found_tokens,
        "reason": verdict.reason,
        "because": verdict.because,
        "advice": verdict.advice,
        "history": list(verdict.history),
        "notes": list(lookup.notes),
    }
    return Answer(tree, _lines(found, verdict))


def _lines(found: Found, verdict: Verdict) -> list[str]:
    lookup, chunk_tokens = found.lookup, found.begin.chunk_tokens
    hits = ", ".join(f"{tier} {tokens:,}" for tier, tokens in lookup.hit_tokens.items())
    lines = [
        f"request: {lookup.request_id}",
        f"time: {clock(found, found.time_s)}",
        f"tokens: {lookup.num_tokens:,} ({lookup.local_tokens:,} in vLLM's own cache)",
        f"hit: {sum(lookup.hit_tokens.values()):,}" + (f" ({hits})" if hits else ""),
    ]
    lines += [f"note: {OF_NOTE[note].because}" for note in lookup.notes if note in OF_NOTE]
    if verdict.reason:
        first = lookup.found_tokens - lookup.found_tokens % chunk_tokens
        lines.append(
            f"missing: from token {lookup.found_tokens:,}, in the chunk of tokens {first:,} to {first + chunk_tokens:,}"
        )
        lines.append(f"reason: {verdict.reason}")
    if verdict.history:
        lines += ["history of that chunk:", *(f"  {line}" for line in verdict.history)]
    lines.append(f"because: {verdict.because}")
    return [*lines, f"advice: {verdict.advice}"] if verdict.advice else lines


def _list(path: Path, most: int) -> Answer:
    latest, count = latest_misses(path, most)
    rows = [
        {
            "time": clock(found, found.time_s),
            "request": found.lookup.request_id,
            "tokens": found.lookup.num_tokens,
            "local_tokens": found.lookup.local_tokens,
            "hit_tokens": sum(found.lookup.hit_tokens.values()),
            "found_tokens": found.lookup.found_tokens,
            "reason": found.lookup.reason,
        }
        for found in latest
    ]
    table = [_TITLES, *(_cells(found) for found in latest)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_TITLES) - 1)]
    text = [
        "  ".join((*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1])) for row in table
    ]
    if not latest:
        text = [f"none of {count:,} requests missed"]
    return Answer({"trace": str(path), "requests": count, "misses": rows}, text)


def _cells(found: Found) -> tuple[str, ...]:
    lookup = found.lookup
    counts = (lookup.num_tokens, lookup.local_tokens, sum(lookup.hit_tokens.values()), lookup.found_tokens)
    return (clock(found, found.time_s), *(f"{count:,}" for count in counts), lookup.reason, lookup.request_id)
