"""Public traces, shrunk until a small model on a CPU can replay them, in the formats of the generators' own loaders.

Blocks stay whole and keep their ids, so that what was shared is shared. Requests keep their order, evenly
spaced.
"""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvstore.tools.outside.generator import SkippedError

BLOCK_TOKENS: Final = 64
CHATS: Final = 8
_CHAT_TURNS: Final = 6
_MOST_BLOCKS: Final = 44  # with its output a prompt fits into the model
_SPAN_MS: Final = 25_000
_OUTPUT_TOKENS: Final = 4

SESSIONS: Final = 6
_SESSION_REQUESTS: Final = 8
_FEWER_BLOCKS: Final = 32
PAUSE_S: Final = 6.0

Json = dict[str, Any]


def shrink_mooncake(source: Path, target: Path, *, chats: int) -> None:
    """Write the first turns of ``chats`` chats; a block of 512 tokens gets 64, and all are sent within 25 seconds.

    A chat is the requests that share their second block; the first one is the same in all.

    Raises:
        SkippedError: the trace is not in Mooncake's format, or has too few chats.
    """
    found: dict[int, list[Json]] = defaultdict(list)
    try:
        for line in source.read_text(encoding="utf-8").splitlines():
            request = json.loads(line)
            if 2 < len(request["hash_ids"]) <= _MOST_BLOCKS:
                found[request["hash_ids"][1]].append(request)
        chosen = [turns[:_CHAT_TURNS] for turns in found.values() if len(turns) >= _CHAT_TURNS][:chats]
        requests = sorted((turn for turns in chosen for turn in turns), key=lambda one: float(one["timestamp"]))
    except (ValueError, LookupError, TypeError) as error:
        raise SkippedError(f"{source} is not in Mooncake's format: {error!r}") from error
    if len(chosen) < chats:
        raise SkippedError(f"{source} has only {len(chosen)} chats of {_CHAT_TURNS} turns")
    span_ms = _SPAN_MS * chats / CHATS
    lines = [
        {
            "timestamp": round(number * span_ms / len(requests)),
            "input_length": BLOCK_TOKENS * len(one["hash_ids"]),
            "output_length": _OUTPUT_TOKENS,
            "hash_ids": one["hash_ids"],
        }
        for number, one in enumerate(requests)
    ]
    target.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def shrink_weka(source: Path, target: Path, *, sessions: int) -> None:
    """Write the first requests of sessions as files of the format of kv-cache-tester; of 32 blocks one stays.

    Raises:
        SkippedError: the trace is not in the stored format, or has too few such sessions.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.json"):
        old.unlink()
    written = 0
    try:
        for session in _sessions(source):
            if (small := _small_session(session)) is not None:
                (target / f"{written:03}.json").write_text(json.dumps(small), encoding="utf-8")
                written += 1
                if written == sessions:
                    return
    except (OSError, EOFError, lzma.LZMAError, ValueError, LookupError, TypeError) as error:
        raise SkippedError(f"{source} cannot be read: {error!r}") from error
    raise SkippedError(f"{source} has only {written} sessions that fit")


def _sessions(source: Path) -> Iterator[Json]:
    """Yield the sessions of a folder of kv-cache-tester's files, or of a packed file with a session in each line."""
    if source.is_dir():
        for file in sorted(source.glob("*.json")):
            yield json.loads(file.read_text(encoding="utf-8"))
        return
    with lzma.open(source, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _small_session(session: Mapping[str, Any]) -> Json | None:
    """Return a shrunk session; None if it is too short, too large, or has other agents."""
    requests = session["requests"][:_SESSION_REQUESTS]
    small = list(map(_small_request, range(len(requests)), requests))
    if len(small) < _SESSION_REQUESTS or None in small:
        return None
    return {
        **{key: session[key] for key in ("id", "models", "block_size", "hash_id_scope")},
        "tool_tokens": session["tool_tokens"] // _FEWER_BLOCKS,
        "system_tokens": session["system_tokens"] // _FEWER_BLOCKS,
        "requests": small,
    }


def _small_request(number: int, request: Mapping[str, Any]) -> Json | None:
    """Return a shrunk request; None if it is no request to a model, or does not fit."""
    if request["type"] not in {"n", "s"}:
        return None
    ids = list(islice(_ids(request), 0, (_MOST_BLOCKS + 1) * _FEWER_BLOCKS, _FEWER_BLOCKS))
    if not 0 < len(ids) <= _MOST_BLOCKS:
        return None
    return {
        **{key: request[key] for key in ("type", "model")},
        "t": number * PAUSE_S,
        "in": BLOCK_TOKENS * len(ids),
        "out": _OUTPUT_TOKENS,
        "hash_ids": ids,
        "api_time": 0.0,
        "think_time": PAUSE_S if number else 0.0,
    }


def _ids(request: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids of a request's blocks, which a packed file has as ranges."""
    if "hash_ids" in request:
        yield from request["hash_ids"]
    else:
        for first, count in request["hash_runs"]:
            yield from range(first, first + count)
