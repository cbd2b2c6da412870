"""Every exception this library raises, in one tree.

    KVStoreError
    ├── ConfigError            a key, a value or a flag is wrong; nothing was started
    ├── LayoutError            a KV cache that cannot be stored as opaque blocks
    ├── InvalidCallError       an argument of a public call breaks its contract
    ├── DeviceFullError        a device has no memory left to move a chunk; that load or store fails, later ones may not
    ├── CodecError             bytes that no codec wrote; a tier reports them to its caller as a miss
    ├── ProtocolError          a message that a cache server or its client would not send; it ends the connection
    ├── ChannelError           memory of another process cannot be read; its bytes are sent over TCP, or the read fails
    ├── TierError              a tier is broken, and may work again later
    │   ├── FolderOwnedError   the disk folder belongs to another live process
    │   ├── TierSetupError     (and ConfigError) a server refuses what it was configured with
    │   └── TierTimeoutError   a call took too long, and may still be using the caller's buffers
    └── ClosedError            the engine was closed before the call

A miss and a full tier are values, never exceptions. Errors of other libraries are translated where they enter
(``raise ... from error``), so a caller catches this tree and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future


class KVStoreError(Exception):
    """The root of the tree. Its message says what was wrong, with which value, and what to do."""


class ConfigError(KVStoreError, ValueError):
    """The configuration cannot be used."""


class LayoutError(KVStoreError, ValueError):
    """The KV cache has a layout, or additional state, that storing whole blocks would not preserve."""


class InvalidCallError(KVStoreError, ValueError):
    """A caller broke the contract of a public method."""


class DeviceFullError(KVStoreError):
    """A device had no memory left for a request, which was not carried out."""


class CodecError(KVStoreError, ValueError):
    """Encoded bytes are malformed."""


class ProtocolError(KVStoreError, ValueError):
    """A message between a cache server and a client is malformed."""


class ChannelError(KVStoreError):
    """A channel cannot be used on this machine, or not with this peer."""


class TierError(KVStoreError):
    """A tier failed as a whole. Its chunks count as missing until it answers again."""


class FolderOwnedError(TierError):
    """The folder of a disk tier is locked by another process."""


class TierSetupError(TierError, ConfigError):
    """A tier's server refuses this configuration because of a password, a right, a certificate or a database.

    At start the configuration must be corrected; later the tier counts as broken until it is.
    """


class TierTimeoutError(TierError):
    """A call to a tier did not end in time.

    The buffers given to the call must not be reused before ``pending.done()``: until then a read may still write to
    them, and a write may still read from them.

    Attributes:
        pending: the abandoned call. If it had not begun, it is done at once and never runs. Otherwise it is done when
            the call ends, with its result or exception, so a late ``put`` may have stored its chunks.
    """

    def __init__(self, message: str, pending: Future[Any]) -> None:
        super().__init__(message)
        self.pending = pending


class ClosedError(KVStoreError):
    """The engine, tier or mover was closed."""
