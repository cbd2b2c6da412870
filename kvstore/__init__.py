"""kvstore: the KV cache that outlives the GPU. See docs/ARCHITECTURE.md for the parts and their promises.

The public names are those below, ``kvstore.tiers``, ``kvstore.channels``, ``kvstore.policies`` and ``kvstore.testing``.
Everything else may change with any version. Importing ``kvstore`` imports nothing else: each name is imported when it
is first used.
"""

TYPE_CHECKING = False  # as type checkers read it; ``typing`` itself would be an import

if TYPE_CHECKING:
    from kvstore.engine import CacheEngine
    from kvstore.errors import (
        ChannelError,
        ClosedError,
        CodecError,
        ConfigError,
        DeviceFullError,
        FolderOwnedError,
        InvalidCallError,
        KVStoreError,
        LayoutError,
        ProtocolError,
        TierError,
        TierSetupError,
        TierTimeoutError,
    )
    from kvstore.keys import KeyExtras, Namespace
    from kvstore.options import EngineOptions, RemoteOptions
    from kvstore.paged.binding import bind_paged_kv

__version__ = "0.1.0"
__all__ = [
    "CacheEngine",
    "ChannelError",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "DeviceFullError",
    "EngineOptions",
    "FolderOwnedError",
    "InvalidCallError",
    "KVStoreError",
    "KeyExtras",
    "LayoutError",
    "Namespace",
    "ProtocolError",
    "RemoteOptions",
    "TierError",
    "TierSetupError",
    "TierTimeoutError",
    "bind_paged_kv",
]

_MODULES = {
    "CacheEngine": "kvstore.engine",
    "EngineOptions": "kvstore.options",
    "KeyExtras": "kvstore.keys",
    "Namespace": "kvstore.keys",
    "RemoteOptions": "kvstore.options",
    "bind_paged_kv": "kvstore.paged.binding",
}  # all others are in kvstore.errors

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - see the module's docstring

        value = globals()[name] = getattr(import_module(_MODULES.get(name, "kvstore.errors")), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
