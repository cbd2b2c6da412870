"""Detects that vLLM's workers take other weights, which vLLM does not report to connectors unless caches are cleared.

KV computed before is of no use afterwards, and KV computed since must not be found under the name of the weights with
which vLLM was started, in a shared tier or after a restart.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

WEIGHT_CALLS: Final = frozenset({"update_weights", "finish_weight_update", "reload_weights"})
"""Calls of vLLM's workers after which their weights may be others."""


class Resettable(Protocol):
    """A cache that forgets what it has."""

    def reset_cache(self) -> object:
        """Forget everything, because the weights have changed."""


_watching: Final[WeakSet[Resettable]] = WeakSet()


def reset_with_weights(cache: Resettable) -> None:
    """Have a cache reset whenever the workers of this process's engine have taken weights. For the engine's thread."""
    if not _watching:
        _watch_engine()
    _watching.add(cache)


def leave_alone(cache: Resettable) -> None:
    """Reset a cache no more, as it is about to close."""
    _watching.discard(cache)


def _watch_engine() -> None:
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - workers have no engine

    collective_rpc = getattr(EngineCore.collective_rpc, "__wrapped__", EngineCore.collective_rpc)

    @wraps(collective_rpc)
    def noted(core: EngineCore, method: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as vLLM's
        try:
            return collective_rpc(core, method, *args, **kwargs)
        finally:  # also if it fails, as some of the weights may be new
            for cache in list(_watching) if isinstance(method, str) and method in WEIGHT_CALLS else ():
                cache.reset_cache()

    EngineCore.collective_rpc = noted
