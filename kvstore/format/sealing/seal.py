"""Seal of one chunk: AES-256-GCM, layer by layer, under a key that is derived for one write of this chunk."""

from __future__ import annotations

import hmac
import re
import secrets
import struct
from typing import Final, Self

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.format.chunkfile import TAG_BYTES, Damage
from kvstore.format.sealing.keyring import ID_PATTERN, KeyRing, RingKey
from kvstore.model.chunks import ByteArray
from kvstore.model.keys import ChunkKey

_VALUE_BYTES: Final = 16
_TEXT: Final = re.compile(f"(({ID_PATTERN}) ([0-9a-f]{{{2 * _VALUE_BYTES}}})) ([0-9a-f]{{16}})")
_CONTEXT: Final = b"kvstore/seal/1\0"


class Seal:
    """Sealing and opening of the layers of one chunk. Thread-safe; the GIL is released meanwhile.

    ``new`` is for a write, ``parse`` for a read.

    Attributes:
        text: names the key, and has the random value of the write and a checksum; it is in the chunk's header.
    """

    def __init__(self, key: RingKey, value: bytes, chunk: ChunkKey, num_blocks: int, codec: str) -> None:
        self.text = _with_sum(f"{key.id} {value.hex()}")
        name = struct.pack("<8s16sI16s", chunk.namespace_id, chunk.prefix_key, num_blocks, value) + codec.encode()
        self._cipher = AESGCM(hmac.digest(key.secret, _CONTEXT + name, "sha256"))

    @classmethod
    def new(cls, keys: KeyRing, tenant: bytes, chunk: ChunkKey, num_blocks: int, codec: str) -> Self:
        """Return a seal that was never used, with the newest key of a tenant."""
        return cls(keys.newest(tenant), secrets.token_bytes(_VALUE_BYTES), chunk, num_blocks, codec)

    @classmethod
    def parse(cls, keys: KeyRing, text: str, chunk: ChunkKey, num_blocks: int, codec: str) -> Self | Damage:
        """Return the seal that a header names, or the damage: its key may be unknown."""
        match = _TEXT.fullmatch(text)
        if match is None or _with_sum(match[1]) != text:
            return Damage.HEADER
        key = keys.get(match[2])
        return Damage.SEAL if key is None else cls(key, bytes.fromhex(match[3]), chunk, num_blocks, codec)

    def close(self, layer: int, data: ByteArray, out: ByteArray) -> int:
        """Encrypt a layer into the front of ``out``, which has ``TAG_BYTES`` more; returns the number of bytes used."""
        size_bytes = len(data) + TAG_BYTES
        self._cipher.encrypt_into(_nonce(layer), data.data, None, out.data[:size_bytes])
        return size_bytes

    def open(self, layer: int, data: ByteArray, out: ByteArray) -> bool:
        """Decrypt the output of ``close`` into ``out``, of its length without the tag. False if it is not authentic.

        Then ``out`` is undefined.
        """
        if len(data) != len(out) + TAG_BYTES:
            return False
        try:
            self._cipher.decrypt_into(_nonce(layer), data.data, None, out.data)
        except InvalidTag:
            return False
        return True


def _with_sum(text: str) -> str:
    """Append a checksum, so that a damaged name is not taken for that of another key."""
    return f"{text} {xxhash.xxh3_64_hexdigest(text.encode())}"


def _nonce(layer: int) -> bytes:
    return layer.to_bytes(12, "big")
