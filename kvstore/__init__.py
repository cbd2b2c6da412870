"""kvstore: the KV cache that outlives the GPU. See docs/ARCHITECTURE.md for the parts and their promises.

The public names are those below, ``kvstore.tiers``, ``kvstore.channels``, ``kvstore.policies`` and ``kvstore.testing``.
Everything else may change with any version. Importing ``kvstore`` imports nothing else: each name is imported when it
is first used.
"""

TYPE_CHECKING = False  # as type checkers read it; ``typing`` itself would be an import

if TYPE_CHECKING:
    from kvstore.engine.engine import CacheEngine
    from kvstore.engine.options import EngineOptions, RemoteOptions
    from kvstore.model.errors import (
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
    from kvstore.model.keys import KeyExtras, Namespace
    from kvstore.model.version import __version__ as __version__
    from kvstore.paged.binding import bind_paged_kv

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
    "CacheEngine": "kvstore.engine.engine",
    "EngineOptions": "kvstore.engine.options",
    "KeyExtras": "kvstore.model.keys",
    "Namespace": "kvstore.model.keys",
    "RemoteOptions": "kvstore.engine.options",
    "__version__": "kvstore.model.version",
    "bind_paged_kv": "kvstore.paged.binding",
}  # all others are in kvstore.model.errors

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__ and name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - see the module's docstring

        value = globals()[name] = getattr(import_module(_MODULES.get(name, "kvstore.model.errors")), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
