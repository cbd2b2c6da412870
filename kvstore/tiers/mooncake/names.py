"""Names of a namespace's objects in a Mooncake Store. ``docs/FORMAT.md`` describes them.

kvs:<namespace id>:epoch                    16 hex digits
kvs:<namespace id>:<epoch>:<key>-<blocks>   a chunk, in the form of its file
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple

from kvstore.model.chunks import ChunkRef

_EPOCH: Final = re.compile(r"[0-9a-f]{16}")


class Home(NamedTuple):
    """Namespace and epoch of chunks. A new epoch is a new home, and the chunks of the old one are unreachable.

    Attributes:
        namespace_id: that of the chunks.
        epoch: 16 hex digits; empty until it is known.
    """

    namespace_id: bytes
    epoch: str = ""

    @property
    def epoch_key(self) -> str:
        """Key that holds the epoch."""
        return f"kvs:{self.namespace_id.hex()}:epoch"

    def key(self, ref: ChunkRef) -> str:
        """Return the key of a chunk."""
        return f"kvs:{self.namespace_id.hex()}:{self.epoch}:{ref.prefix_key.hex()}-{ref.num_blocks}"

    @property
    def dead_pattern(self) -> str:
        """Regular expression of the keys of all chunks of other epochs."""
        return f"^kvs:{self.namespace_id.hex()}:(?!{self.epoch}:|epoch$).*"

    def renewed(self) -> Home:
        """Return a home of the namespace with an epoch that was never used before."""
        return Home(self.namespace_id, secrets.token_hex(8))


def parse_epoch(value: str) -> str | None:
    """Return an epoch; None for anything else."""
    return value if _EPOCH.fullmatch(value) else None
