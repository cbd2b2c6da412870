"""Every exception this library raises, in one tree.

    KVStoreError
    ├── ConfigError            a key, a value or a flag is wrong; nothing was started
    ├── LayoutError            a KV cache that cannot be stored as opaque blocks
    ├── InvalidCallError       an argument of a public call breaks its contract
    ├── DeviceFullError        a device has no memory left to move a chunk; that load or store fails, later ones may not
    ├── CodecError             bytes that no codec made; becomes a miss before it reaches a caller of a tier
    ├── ProtocolError          a message that a cache server or its client would not send; it ends the connection
    ├── ChannelError           memory of another process cannot be read; then its bytes come over TCP, or not
    ├── TierError              a tier is broken: it may work again later
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
    """The KV cache has a layout, or state beside it, that storing whole blocks would not preserve."""


class InvalidCallError(KVStoreError, ValueError):
    """A caller broke the contract of a public method."""


class DeviceFullError(KVStoreError):
    """A device had no memory left for what it was given, and did not do it."""


class CodecError(KVStoreError, ValueError):
    """Encoded bytes are malformed."""


class ProtocolError(KVStoreError, ValueError):
    """A message between a cache server and a client is malformed."""


class ChannelError(KVStoreError):
    """A channel cannot be used on this machine, or not with this peer."""


class TierError(KVStoreError):
    """A tier failed as a whole. What it held counts as missing until it answers again."""


class FolderOwnedError(TierError):
    """The folder of a disk tier is locked by another process."""


class TierSetupError(TierError, ConfigError):
    """A tier's server answers, but not to this configuration: a password, a right, a certificate, a database.

    At start that is a configuration to be corrected; later it is a tier that is broken until somebody corrects it.
    """


class TierTimeoutError(TierError):
    """A call to a tier did not end in time.

    The buffers given to the call are not the caller's again before ``pending.done()``: until then a read may still
    write to them, and a write may still read from them.

    Attributes:
        pending: the call given up. It is done at once if the call had not begun, and then never will. Otherwise it is
            done when the call ends, with what it returned or raised: a late ``put`` may well have stored its chunks.
    """

    def __init__(self, message: str, pending: Future[Any]) -> None:
        super().__init__(message)
        self.pending = pending


class ClosedError(KVStoreError):
    """The engine, tier or mover was closed."""
