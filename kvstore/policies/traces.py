"""Traces: the chunks that each request used, without their content.

Two formats can be read, both JSON lines. Our own begins with a header and is described in ``docs/FORMAT.md``; the other
is that of the traces published with Mooncake (FAST 2025), with ``hash_ids`` of blocks of 512 tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.model.keys import PrefixKey

FORMAT_NAME = "kvstore-trace"
FORMAT_VERSION = 1
MOONCAKE_BLOCK_TOKENS = 512
_KEY_BYTES = 8


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
        time_s: time since the beginning of the trace.
        keys: keys of its chunks, head first. Equal keys stand for equal prefixes.
        chunk_tokens: tokens in each chunk but the last.
        tail_tokens: tokens in the last chunk.
        num_tokens: tokens of all its chunks, as the trace states.
        answer_tokens: tokens of its answer; None if the trace does not say.
    """

    time_s: float
    keys: tuple[PrefixKey, ...]
    chunk_tokens: int
    tail_tokens: int
    num_tokens: int
    answer_tokens: int | None = None

    def tokens_of(self, position: int) -> int:
        """Return the tokens in the chunk at this position."""
        return self.tail_tokens if position == len(self.keys) - 1 else self.chunk_tokens


# -- reading -----------------------------------------------------------------------------------------------------------


def read_trace(path: Path, key_tokens: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace, in order. Requests without chunks are left out.

    With ``key_tokens``, every key must stand for that many tokens, except the last one of a request.

    Raises:
        ConfigError: the file cannot be read, or a line is in neither format or has keys of another size.
    """
    number, chunk_tokens = 0, 0
    keys_of = _MooncakeKeys()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                fields = json.loads(line)
                if number == 1 and fields.get("format") == FORMAT_NAME:
                    chunk_tokens = _chunk_tokens(fields)
                    continue
                request = (
                    _own_request(fields, chunk_tokens)
                    if chunk_tokens
                    else _mooncake_request(fields, key_tokens or MOONCAKE_BLOCK_TOKENS, keys_of)
                )
                if key_tokens is not None:
                    _check_keys(request, key_tokens)
                if request.keys:
                    yield request
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}, line {number} is not a request of a trace ({_reason(error)})") from error
    if not number:
        raise ConfigError(f"{path} is empty: it is not a trace")


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _chunk_tokens(header: dict[str, Any]) -> int:
    if header["version"] != FORMAT_VERSION:
        raise ValueError(f"version is {header['version']!r}: this release reads {FORMAT_VERSION}")
    if int(header["chunk_tokens"]) < 1:
        raise ValueError(f"chunk_tokens is {header['chunk_tokens']!r}: it must be at least 1")
    return int(header["chunk_tokens"])


def _own_request(fields: dict[str, Any], chunk_tokens: int) -> Request:
    keys = tuple(bytes.fromhex(key) for key in fields["keys"])
    return _request(float(fields["time_s"]), keys, chunk_tokens, int(fields["num_tokens"]), fields.get("answer_tokens"))


class _MooncakeKeys(dict[int, PrefixKey]):
    """Keys of blocks, each made once, as agents ask with the same ones a hundred times."""

    def __missing__(self, block: int) -> PrefixKey:
        key = self[block] = int(block).to_bytes(_KEY_BYTES, "little")
        return key


def _mooncake_request(fields: dict[str, Any], chunk_tokens: int, keys_of: _MooncakeKeys) -> Request:
    keys = tuple(map(keys_of.__getitem__, fields["hash_ids"]))
    answer = fields.get("output_length")
    return _request(fields["timestamp"] / 1000, keys, chunk_tokens, int(fields["input_length"]), answer)


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


# -- recording ---------------------------------------------------------------------------------------------------------


class TraceRecorder:
    """Writes a trace in our own format, through a buffer. Thread-safe.

    Keys are hashed once more, with a secret made for this file and never written, so that knowing a prompt does not
    reveal if it is in the trace.

    Attributes:
        recorded: requests written.
        dropped: requests left out, because the file had reached its bound or could not be written.
    """

    def __init__(self, path: Path, chunk_tokens: int, *, max_bytes: int = 1 << 30) -> None:
        """Begin a new file, readable by its owner only.

        Raises:
            ConfigError: it exists already, or cannot be created.
        """
        self.recorded = 0
        self.dropped = 0
        self._secret = secrets.token_bytes(32)
        self._left_bytes = max_bytes
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot record a trace in {path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "w", encoding="ascii", buffering=1 << 16)
        self._write({"format": FORMAT_NAME, "version": FORMAT_VERSION, "chunk_tokens": chunk_tokens})

    @classmethod
    def open_next(cls, path: Path, chunk_tokens: int) -> TraceRecorder:
        """Begin a new file for each start, under the first free name of ``path``, ``path.1``, ``path.2``, ...

        Raises:
            ConfigError: the file cannot be created.
        """
        later = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        return cls(next(name for name in itertools.chain([path], later) if not name.exists()), chunk_tokens)

    def record(self, keys: Sequence[PrefixKey], num_tokens: int, answer_tokens: int) -> None:
        """Write a request: the keys of all its chunks, head first, the number of their tokens, and of its answer's.

        Call it once for each request. After ``close`` requests count as dropped.
        """
        names = [blake2b(key, digest_size=_KEY_BYTES, key=self._secret).hexdigest() for key in keys]
        time_s = round(time.monotonic() - self._start_s, 3)
        with self._lock:
            fields = {"time_s": time_s, "num_tokens": num_tokens, "answer_tokens": answer_tokens, "keys": names}
            written = self._write(fields)
            self.recorded += written
            self.dropped += not written

    def close(self) -> None:
        """Write the buffer and close the file. Idempotent."""
        with self._lock:
            self._left_bytes = 0
            try:
                self._file.close()
            except OSError:  # a full disk: the trace ends early
                self.dropped += 1

    def _write(self, fields: dict[str, Any]) -> bool:
        line = json.dumps(fields, separators=(",", ":")) + "\n"
        if len(line) > self._left_bytes:
            self._left_bytes = 0  # a trace with a gap would be misleading
            return False
        try:
            self._file.write(line)
        except OSError:
            self._left_bytes = 0
            return False
        self._left_bytes -= len(line)
        return True
