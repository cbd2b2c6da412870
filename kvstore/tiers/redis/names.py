"""Names of everything in Redis that belongs to a namespace, and the commands that look up a chunk by its names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvstore.model.chunks import ChunkRef

NO_CHUNK: Final = -2  # answers to PTTL
NO_END: Final = -1
PREFIX = b"kvs:{"


def commit_key(tag: bytes) -> bytes:
    """Return the key of the commit, whose existence means that the chunk with this tag is stored."""
    return PREFIX + tag + b"}:c"


def exists_command(tag: bytes) -> bytes:
    """Return the command that looks up the chunk with this tag. A lookup sends one for each chunk."""
    key = commit_key(tag)
    return b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key)


def rest_command(tag: bytes) -> bytes:
    """Return the command for the rest of the time to live of the chunk with this tag.

    The answer is in milliseconds, or ``NO_CHUNK`` or ``NO_END``.
    """
    key = commit_key(tag)
    return b"*2\r\n$4\r\nPTTL\r\n$%d\r\n%b\r\n" % (len(key), key)


@dataclass(frozen=True)
class Home:
    """Namespace and epoch of chunks. A new epoch is a new home, and the chunks of the old one are unreachable.

    Attributes:
        namespace_id: that of the chunks.
        epoch: 16 hex digits; empty until it is known.
    """

    namespace_id: bytes
    epoch: bytes = b""

    @cached_property
    def epoch_tag(self) -> bytes:
        """Hash tag of ``epoch_key``."""
        return self.namespace_id.hex().encode()

    @cached_property
    def epoch_key(self) -> bytes:
        """Key that holds the epoch."""
        return PREFIX + self.epoch_tag + b"}:epoch"

    @cached_property
    def pattern(self) -> bytes:
        """Pattern of all keys of the namespace's chunks, of any epoch."""
        return PREFIX + self.epoch_tag + b":*"

    @cached_property
    def _stem(self) -> bytes:
        return b"%b:%b:" % (self.epoch_tag, self.epoch)

    def tag(self, ref: ChunkRef) -> bytes:
        """Return the hash tag of a chunk, which decides its node."""
        return b"%b%b:%d" % (self._stem, ref.prefix_key.hex().encode(), ref.num_blocks)

    def keys(self, ref: ChunkRef, num_parts: int) -> list[bytes]:
        """Return all keys of a chunk, the commit key first."""
        stem = PREFIX + self.tag(ref) + b"}:"
        return [commit_key(self.tag(ref)), *(stem + b"%d" % part for part in range(num_parts))]

    def trails_tag(self, number: int) -> bytes:
        """Return the hash tag of a set of trails, in the form of a chunk without blocks, which all sweeps parse."""
        return b"%b%02x:0" % (self._stem, number)

    def trails_key(self, number: int) -> bytes:
        """Return the key of a set of trails."""
        return PREFIX + self.trails_tag(number) + b"}:t"

    def parse(self, key: bytes) -> tuple[ChunkRef, bytes] | None:
        """Return the chunk that a key of this home belongs to, and the key's purpose; None for other homes."""
        try:
            namespace, epoch, prefix, rest = key.removeprefix(PREFIX).split(b":", 3)
            blocks, _, purpose = rest.partition(b"}:")
            ref = ChunkRef(bytes.fromhex(prefix.decode()), int(blocks))
        except ValueError:
            return None
        is_ours = namespace == self.namespace_id.hex().encode() and epoch == self.epoch
        return (ref, purpose) if is_ours else None
