"""Names of chunks: equal for equal content, in every process, on every machine.

A *prefix key* is the first 16 bytes of a sha256 over a request's seed and all tokens from position 0 to the chunk's
end, taken as running snapshots of one hash. A *namespace* is everything that must be equal for KV to be interchangeable
between two engines; its 8-byte id is the other part of a chunk's name. Neither uses Python's ``hash`` nor anything else
that differs between processes.

The hash covers, all little-endian:

- the seed: ``kvstore/1``, then the request's LoRA, cache salt and tags, each domain-tagged and length-prefixed;
- the tokens as uint32;
- after the tokens of a block, one record for every multimodal feature that overlaps it: the word ``0xFFFFFFFF`` (which
  is no token id), the identifier with its length, and the feature's offset in the prompt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.model.errors import InvalidCallError

if TYPE_CHECKING:
    from hashlib import _Hash

PREFIX_KEY_BYTES = 16
NAMESPACE_ID_BYTES = 8
KEY_VERSION = b"kvstore/1"
EPOCH_FIELD = "epoch"
_TENANT = b"kvstore/tenant/1\0"
_FEATURE_MARK = struct.pack("<I", 0xFFFFFFFF)
_MAX_TOKEN_ID = 0xFFFFFFFE

PrefixKey = bytes


class ChunkKey(NamedTuple):
    """A chunk's full name: its namespace, and the key of its tokens."""

    namespace_id: bytes
    prefix_key: PrefixKey


@dataclass(frozen=True)
class Namespace:
    """Named fields that must be equal for two engines to share KV.

    The fields are free-form strings and integers, so that a mismatch can be reported by name. Two namespaces are equal
    if and only if their canonical JSON is.
    """

    fields: Mapping[str, str | int]

    def to_json(self) -> str:
        """Return the canonical form: sorted keys, no spaces."""
        return json.dumps(dict(self.fields), sort_keys=True, separators=(",", ":"))

    @cached_property
    def id(self) -> bytes:
        """The 8-byte name of this namespace."""
        return hashlib.sha256(b"kvstore/namespace/1\0" + self.to_json().encode()).digest()[:NAMESPACE_ID_BYTES]

    def at_epoch(self, epoch: str) -> Namespace:
        """Return this namespace after its weights were changed in place; ``epoch`` is a name never used before."""
        return Namespace({**self.fields, EPOCH_FIELD: epoch})

    def differing_fields(self, other: Namespace) -> list[str]:
        """Return the names of the fields that differ, sorted."""
        names = self.fields.keys() | other.fields.keys()
        return sorted(name for name in names if self.fields.get(name) != other.fields.get(name))


def new_epoch() -> str:
    """Return a name for an epoch, never used before."""
    return secrets.token_hex(8)


class Feature(NamedTuple):
    """A multimodal item of a prompt: its content, and the tokens ``[offset, offset + length)`` that stand for it."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class KeyExtras:
    """Inputs of a request's KV in addition to its tokens.

    Attributes:
        lora: name of the adapter and a fingerprint of its files, or None for the base model.
        cache_salt: requests share KV only within one salt.
        tags: further (name, value) pairs that must be equal to share.
        features: multimodal items, in order of their offset.
    """

    lora: tuple[str, str] | None = None
    cache_salt: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    features: tuple[Feature, ...] = ()

    def seed(self) -> bytes:
        """Return the bytes hashed before the first token."""
        parts = [KEY_VERSION]
        if self.lora is not None:
            parts += [_tagged("lora"), _tagged(self.lora[0]), _tagged(self.lora[1])]
        if self.cache_salt:
            parts += [_tagged("salt"), _tagged(self.cache_salt)]
        for name, value in sorted(self.tags):
            parts += [_tagged("tag"), _tagged(name), _tagged(value)]
        body = b"".join(parts)
        return struct.pack("<I", len(body)) + body

    def tenant(self) -> bytes:
        """Return 16 bytes that name salt and tags, by which encryption at rest chooses a key; empty without both."""
        if not (self.cache_salt or self.tags):
            return b""
        return hashlib.sha256(_TENANT + KeyExtras(cache_salt=self.cache_salt, tags=self.tags).seed()).digest()[:16]

    @cached_property
    def salt_name(self) -> str:
        """The first 16 hexadecimal digits of the salt's SHA-256, which tell less than the salt; empty without one."""
        if not self.cache_salt:
            return ""
        return hashlib.sha256(self.cache_salt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


NO_EXTRAS = KeyExtras()


class PrefixHasher:
    """The prefix keys of one growing token sequence.

    Keeps one hash snapshot per chunk, so that a longer sequence costs only its new tokens, and keys of block ends
    inside a chunk can be computed later. Not thread-safe: it belongs to one request.
    """

    def __init__(self, chunk_tokens: int, block_tokens: int, extras: KeyExtras = NO_EXTRAS) -> None:
        if block_tokens <= 0 or chunk_tokens % block_tokens:
            raise InvalidCallError(
                f"chunk size {chunk_tokens} is not a multiple of the block size {block_tokens}: choose a multiple"
            )
        self.chunk_tokens = chunk_tokens
        self.block_tokens = block_tokens
        self.blocks_per_chunk = chunk_tokens // block_tokens
        self._records: dict[int, list[bytes]] = {}  # records of features, by the block they are hashed with
        self._features = [_Span.of(feature, block_tokens) for feature in extras.features]  # not fully recorded yet
        self._recorded_blocks = 0
        self._tokens = array("I")
        self._seen: list[int] = []  # the same as Python integers, mostly those of the caller's list
        self._source: Sequence[int] | None = None  # the caller's sequence
        self.extras = extras
        self.tenant = extras.tenant()
        self._snapshots: list[_Hash] = [hashlib.sha256(extras.seed())]
        self._chunk_keys: list[PrefixKey] = []
        self._block_keys: tuple[int, int, list[PrefixKey]] = 0, 0, []  # the last result: chunk, end token, keys

    @property
    def num_tokens(self) -> int:
        """Number of tokens seen so far."""
        return len(self._tokens)

    def update(self, tokens: Sequence[int]) -> None:
        """Hash the whole sequence from position 0; a prefix of it may be known already.

        If known tokens have changed, or there are fewer, all are hashed again. They are compared one by one (0.5 ms for
        128k), unless it is the same object with the same length and the same last token. A caller's sequence may grow
        between two calls, but the tokens in it must not change.

        Raises:
            InvalidCallError: a token id is negative or does not fit in 32 bits.
        """
        known = len(self._seen)
        if tokens is self._source and known and len(tokens) == known and tokens[-1] == self._seen[-1]:
            return
        if _listed(tokens[:known]) != self._seen:
            self.reset()
            known = 0
        self._source = tokens
        if len(tokens) == known:
            return
        added = _listed(tokens[known:])
        try:
            fresh = array("I", added)
        except (OverflowError, TypeError) as error:
            raise InvalidCallError(f"token ids must be integers in 0..{_MAX_TOKEN_ID}: {error}") from error
        if np.frombuffer(fresh, np.uint32).max() > _MAX_TOKEN_ID:
            raise InvalidCallError(f"token id {0xFFFFFFFF} is reserved: ids must be in 0..{_MAX_TOKEN_ID}")
        if known:
            self._tokens.extend(fresh)
        else:
            self._tokens = fresh
        self._record_features()
        self._absorb_whole_chunks()
        self._seen += added

    def reset(self) -> None:
        """Forget all tokens."""
        self._tokens = array("I")
        self._seen = []
        self._source = None
        del self._snapshots[1:]
        self._chunk_keys.clear()
        self._block_keys = 0, 0, []

    def chunk_keys(self) -> Sequence[PrefixKey]:
        """Return the keys at the ends of all whole chunks so far. The caller must not change the list."""
        return self._chunk_keys

    def block_keys(self, chunk: int) -> list[PrefixKey]:
        """Return the keys at the ends of the whole blocks in chunk number ``chunk``, as far as its tokens are known.

        For a whole chunk the last one is the chunk's own key. The caller must not change the list, which is kept for
        the next lookup of the same chunk, because a waiting request is looked up repeatedly.
        """
        if chunk >= len(self._snapshots):
            return []
        begin = chunk * self.chunk_tokens
        end = min(begin + self.chunk_tokens, len(self._tokens))
        known_chunk, known_end, known = self._block_keys
        if known_chunk == chunk and known_end == end:
            return known
        running = self._snapshots[chunk].copy()
        keys: list[PrefixKey] = []
        with memoryview(self._tokens) as tokens:
            for stop in range(begin + self.block_tokens, end + 1, self.block_tokens):
                self._absorb(running, tokens, stop - self.block_tokens, stop)
                keys.append(running.digest()[:PREFIX_KEY_BYTES])
        self._block_keys = chunk, end, keys
        return keys

    def trail(self, chunk: int) -> bytes:
        """Return the trail of chunk number ``chunk``, which is the concatenation of its ``block_keys``."""
        return b"".join(self.block_keys(chunk))

    def trails(self, keys: Iterable[PrefixKey], before: PrefixKey = b"") -> dict[PrefixKey, bytes]:
        """Return the trails of those of the chunks that belong to the sequence, by key.

        They are whole chunks, or tails behind the last whole chunk or the one with the key ``before``, none for the
        sequence's begin: it may have grown since a tail was its end.
        """
        wanted = set(keys)
        found, places = {}, [len(self._chunk_keys)] if before else [len(self._chunk_keys), 0]
        for number, key in enumerate(self._chunk_keys):
            if key in wanted:
                found[key] = self.trail(number)
            if key == before:
                places.append(number + 1)
        while places and len(found) < len(wanted):
            tails = self.block_keys(places.pop())
            found.update((key, b"".join(tails[:end])) for end, key in enumerate(tails, 1) if key in wanted)
        return found

    def _absorb_whole_chunks(self) -> None:
        first, last = len(self._chunk_keys), len(self._tokens) // self.chunk_tokens
        size, running = self.chunk_tokens, self._snapshots[-1]
        with memoryview(self._tokens) as tokens:  # slices of it are not copied
            for begin in range(first * size, last * size, size):
                running = running.copy()
                if sys.byteorder == "little" and not self._has_records(begin, begin + size):  # the usual case
                    running.update(tokens[begin : begin + size])
                else:
                    for start in range(begin, begin + size, self.block_tokens):
                        self._absorb(running, tokens, start, start + self.block_tokens)
                self._snapshots.append(running)
                self._chunk_keys.append(running.digest()[:PREFIX_KEY_BYTES])

    def _record_features(self) -> None:
        """Note the records of features that overlap the blocks that are whole now."""
        first, end = self._recorded_blocks, len(self._tokens) // self.block_tokens
        if not self._features or end <= first:
            return
        for span in self._features:
            for block in range(max(first, span.first_block), min(end, span.end_block)):
                self._records.setdefault(block, []).append(span.record)
        self._features = [span for span in self._features if span.end_block > end]
        self._recorded_blocks = end

    def _has_records(self, begin: int, end: int) -> bool:
        """Tell if a feature overlaps a block of the tokens ``[begin, end)``."""
        blocks = range(begin // self.block_tokens, end // self.block_tokens)
        return bool(self._records) and any(block in self._records for block in blocks)

    def _absorb(self, running: _Hash, tokens: memoryview, begin: int, end: int) -> None:
        """Hash a block, the tokens ``[begin, end)``, and the features that overlap it."""
        part = tokens[begin:end]
        if sys.byteorder == "big":  # pragma: no cover - no such machine in the field
            swapped = array("I", part)
            swapped.byteswap()
            part = memoryview(swapped)
        running.update(part)
        for record in self._records.get(begin // self.block_tokens, ()):
            running.update(record)


class _Span(NamedTuple):
    """The blocks that a feature overlaps, and the record hashed with each of them."""

    first_block: int
    end_block: int
    record: bytes

    @classmethod
    def of(cls, feature: Feature, block_tokens: int) -> _Span:
        record = _FEATURE_MARK + _tagged(feature.identifier) + struct.pack("<Q", feature.offset)
        end = feature.offset + feature.length
        return cls(feature.offset // block_tokens, -(-end // block_tokens), record)


def _listed(tokens: Sequence[int]) -> list[int]:
    """Return a slice of a sequence as a list; a slice of a list is one already."""
    return tokens if isinstance(tokens, list) else list(tokens)


def _tagged(text: str) -> bytes:
    """Return a string's bytes with their length in front, so that different lists of strings give different bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(raw)) + raw
