"""Traces: the chunks that each request used, without their content, and why others were missing.

Two formats can be read, both JSON lines. Our own begins with a header and is described in ``docs/FORMAT.md``; the other
is that of the traces published with Mooncake (FAST 2025), with ``hash_ids`` of blocks of 512 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvstore.model.errors import ConfigError
from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.model.keys import PrefixKey

FORMAT_NAME = "kvstore-trace"
FORMAT_VERSION = 2
MOONCAKE_BLOCK_TOKENS = 512
KEY_BYTES = 8
MAX_CHUNK_TOKENS = 1 << 30
_WITHOUT_REASONS = 1  # the version before, which had requests only


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
        time_s: time since the beginning of the trace.
        keys: keys of its chunks, head first. Equal keys stand for equal prefixes.
        chunk_tokens: tokens in each chunk but the last.
        tail_tokens: tokens in the last chunk.
        num_tokens: tokens of all its chunks, as the trace states.
        answer_tokens: tokens of its answer; None if the trace does not say.
        request_id: vLLM's id; empty if the trace does not say.
        session: name of the conversation; empty if the trace does not say.
    """

    time_s: float
    keys: tuple[PrefixKey, ...]
    chunk_tokens: int
    tail_tokens: int
    num_tokens: int
    answer_tokens: int | None = None
    request_id: str = ""
    session: str = ""

    def tokens_of(self, position: int) -> int:
        """Return the tokens in the chunk at this position."""
        return self.tail_tokens if position == len(self.keys) - 1 else self.chunk_tokens


class Begin(NamedTuple):
    """Header of a trace.

    Attributes:
        chunk_tokens: tokens in each chunk but the last of a request; 0 if the trace does not say.
        start_s: the time of its beginning, in seconds since 1970; 0 if the trace does not say.
        has_reasons: lookups and events are recorded, too.
    """

    chunk_tokens: int = 0
    start_s: float = 0.0
    has_reasons: bool = False


class Tiers(NamedTuple):
    """Sizes of an engine's own tiers, for each of its workers; 0 where there is none.

    Attributes:
        slots: chunks that fit in memory.
        slot_bytes: memory of each.
        disk_bytes: bound of the disk.
        chunk_bytes: bytes of a whole chunk on disk.
        keeps_in_memory: False if memory is for staging only.
        has_remote: there is a remote tier.
    """

    slots: int
    slot_bytes: int
    disk_bytes: int
    chunk_bytes: int
    keeps_in_memory: bool
    has_remote: bool


class LookedUp(NamedTuple):
    """Lookup of a request, as it counted when the request was first scheduled.

    Attributes:
        request_id: vLLM's id.
        num_tokens: tokens of the request.
        local_tokens: those in vLLM's own prefix cache.
        found_tokens: the end of the longest known prefix.
        hit_tokens: tokens that were loaded, by tier.
        reason: the reason why no more was found, a value of ``MissReason``; empty if all was.
        missing: keys at the ends of the blocks of the first missing chunk, as far as they were not found.
        notes: what was special about the request, such as ``skip_save``.
    """

    request_id: str
    num_tokens: int
    local_tokens: int
    found_tokens: int
    hit_tokens: Mapping[str, int]
    reason: str = ""
    missing: Sequence[PrefixKey] = ()
    notes: Sequence[str] = ()


class Timed(NamedTuple):
    """Record other than a request, with its time since the beginning of the trace."""

    time_s: float
    what: LookedUp | ChunkEvent | Tiers


Record: TypeAlias = Begin | Request | Timed
_ID, _LOOKUP, _EVENT, _TIERS, _SESSION = "id", "lookup", "event", "tiers", "session"
_FATES = {fate.value for fate in Fate}
_CAUSES = {cause.value: cause for cause in Cause}


# -- reading -----------------------------------------------------------------------------------------------------------


def read_trace(path: Path, key_tokens: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace, in order. Requests without chunks are left out.

    With ``key_tokens``, every key must stand for that many tokens, except the last one of a request.

    Raises:
        ConfigError: the file cannot be read, or a line is in neither format or has keys of another size.
    """
    for record in read_records(path, key_tokens):
        if isinstance(record, Request) and record.keys:
            yield record


def read_records(path: Path, key_tokens: int | None = None, *, containing: str = "") -> Iterator[Record]:
    """Yield all records of a trace, in order, its header first; with a text, only those of lines that contain it.

    A last line that is cut off, as the trace may still be written, is left out. ``key_tokens`` as in ``read_trace``.

    Raises:
        ConfigError: as ``read_trace``.
    """
    number, header, keys_of = 0, Begin(), _MooncakeKeys()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if number > 1 and containing not in line:
                    continue
                try:
                    fields = json.loads(line)
                except ValueError:
                    if number > 1 and not line.endswith("\n"):
                        return
                    raise
                if number == 1:
                    is_ours = fields.get("format") == FORMAT_NAME
                    yield (header := _header(fields) if is_ours else Begin())
                    if is_ours:
                        continue
                chunk_tokens = header.chunk_tokens
                if header.has_reasons and "keys" not in fields:
                    yield from _reasons(fields)
                    continue
                request = (
                    _own_request(fields, chunk_tokens)
                    if chunk_tokens
                    else _mooncake_request(fields, key_tokens or MOONCAKE_BLOCK_TOKENS, keys_of)
                )
                if key_tokens is not None:
                    _check_keys(request, key_tokens)
                yield request
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}, line {number} is not a request of a trace ({_reason(error)})") from error
    if not number:
        raise ConfigError(f"{path} is empty: it is not a trace")


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _header(fields: dict[str, Any]) -> Begin:
    version, chunk_tokens = fields["version"], int(fields["chunk_tokens"])
    if version not in {_WITHOUT_REASONS, FORMAT_VERSION}:
        raise ValueError(f"version is {version!r}: this release reads {_WITHOUT_REASONS} and {FORMAT_VERSION}")
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}: it must be at least 1, and at most {MAX_CHUNK_TOKENS:,}")
    return Begin(chunk_tokens, float(fields.get("start_s", 0.0)), has_reasons=version != _WITHOUT_REASONS)


def _session(fields: dict[str, Any]) -> str:
    session = str(fields.get(_SESSION, ""))
    session.encode()  # fails here, where the line is known, and not in a router
    return session


def _own_request(fields: dict[str, Any], chunk_tokens: int) -> Request:
    keys = tuple(map(bytes.fromhex, fields["keys"]))
    request = _request(
        float(fields["time_s"]), keys, chunk_tokens, int(fields["num_tokens"]), fields.get("answer_tokens")
    )
    return request._replace(request_id=str(fields.get(_ID, "")), session=_session(fields))


# -- lines of lookups, events and tiers --------------------------------------------------------------------------------


def fields_of(time_s: float, what: LookedUp | Tiers) -> dict[str, Any]:
    """Return the fields of a line, without the keys that a lookup missed."""
    if isinstance(what, Tiers):
        return {"time_s": time_s, _TIERS: what._asdict()}
    fields = what._asdict()
    del fields["missing"]
    return {"time_s": time_s, _LOOKUP: fields.pop("request_id")} | {
        name: value for name, value in fields.items() if value
    }


def fields_of_events(time_s: float, first: ChunkEvent, chunks: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the fields of a line for the same event of several chunks, each with its keys as in ``ChunkEvent``."""
    fields = {"time_s": time_s, _EVENT: first.fate.value, "place": first.place, "cause": first.cause.value}
    return {**{name: value for name, value in fields.items() if value != ""}, "chunks": chunks}


def _reasons(fields: dict[str, Any]) -> Iterator[Timed]:
    """Yield what a line says besides requests; nothing if only a later release knows it."""
    time_s = float(fields["time_s"])
    if _TIERS in fields:
        yield Timed(time_s, Tiers(**{name: fields[_TIERS][name] for name in Tiers._fields}))
    elif _LOOKUP in fields:
        yield Timed(time_s, _looked_up(fields))
    elif _EVENT in fields:
        if fields[_EVENT] not in _FATES:
            return
        fate, cause = Fate(fields[_EVENT]), _CAUSES.get(fields.get("cause", ""), Cause.NONE)
        for chunk in fields["chunks"]:
            key, first_key, newcomer, *_ = (*map(bytes.fromhex, chunk), b"", b"", b"")
            yield Timed(time_s, ChunkEvent(fate, key, first_key, str(fields.get("place", "")), cause, newcomer))


def _looked_up(fields: dict[str, Any]) -> LookedUp:
    counts = {name: int(fields.get(name, 0)) for name in ("num_tokens", "local_tokens", "found_tokens")}
    return LookedUp(
        request_id=str(fields[_LOOKUP]),
        **counts,
        hit_tokens={str(tier): int(tokens) for tier, tokens in fields.get("hit_tokens", {}).items()},
        reason=str(fields.get("reason", "")),
        missing=tuple(map(bytes.fromhex, fields.get("missing", ()))),
        notes=tuple(map(str, fields.get("notes", ()))),
    )


class _MooncakeKeys(dict[int, PrefixKey]):
    """Keys of blocks, each made once, as agents ask with the same ones a hundred times."""

    def __missing__(self, block: int) -> PrefixKey:
        key = self[block] = int(block).to_bytes(KEY_BYTES, "little")
        return key


def _mooncake_request(fields: dict[str, Any], chunk_tokens: int, keys_of: _MooncakeKeys) -> Request:
    keys = tuple(map(keys_of.__getitem__, fields["hash_ids"]))
    answer = fields.get("output_length")
    request = _request(fields["timestamp"] / 1000, keys, chunk_tokens, int(fields["input_length"]), answer)
    return request._replace(session=_session(fields)) if _SESSION in fields else request


def _request(
    time_s: float, keys: tuple[PrefixKey, ...], chunk_tokens: int, num_tokens: int, answer_tokens: float | None
) -> Request:
    tail_tokens = num_tokens - chunk_tokens * (len(keys) - 1)
    answer = None if answer_tokens is None else max(0, int(answer_tokens))
    return Request(time_s, keys, chunk_tokens, min(max(tail_tokens, 1), chunk_tokens), num_tokens, answer)


def _check_keys(request: Request, key_tokens: int) -> None:
    if request.chunk_tokens != key_tokens:
        raise ValueError(f"its keys stand for {request.chunk_tokens} tokens, not for {key_tokens}")
    if len(request.keys) != -(-request.num_tokens // key_tokens):
        raise ValueError(
            f"{request.num_tokens:,} tokens have {len(request.keys)} keys: a key does not stand for {key_tokens} tokens"
        )
