"""The ``kvstore`` command in a process that stops at a gate in the middle of its work; takes the command's arguments.

At the gate it writes a line to standard error, and continues when it reads a byte.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Self

from kvstore.tools import cli

GATE = "at the gate"


def at_gate() -> None:
    print(GATE, file=sys.stderr, flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:  # a call that waits misses a signal right before it
        pass
    os.read(sys.stdin.fileno(), 1)


def gated(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return the same call, with a gate in the call of this number."""
    calls = 0

    def gated_call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            at_gate()
        return call(*arguments, **named)

    return gated_call


def measured_and_left(*_: object) -> Sequence[object]:
    """Stop at the gate in a measurement, and again when it is left."""
    try:
        at_gate()
    finally:
        at_gate()
    return []


def prepare_warm() -> None:
    """Stop at the gate in the start of a model named ``late``, and in the second batch of others."""
    from support.warm_engine import WarmEngine

    class Offline(WarmEngine):
        def __init__(self, model: str, **_: object) -> None:
            super().__init__()
            if model == "late":
                at_gate()
            self.compute = gated(self.compute, 2)  # type: ignore[method-assign]

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    module: Any = ModuleType("kvstore.adapters.vllm.offline.engine")
    module.OfflineEngine, module.parse_engine_args = Offline, lambda _: {}
    sys.modules[module.__name__] = module


def prepare_bench() -> None:
    from kvstore.tools.bench import run
    from kvstore.tools.bench.geometry import GEOMETRIES, Geometry

    GEOMETRIES["toy"] = Geometry("toy", layers=2, kv_heads=2, head_size=16, chunk_tokens=64)
    run.CALLS = (SimpleNamespace(line=measured_and_left),)  # type: ignore[attr-defined, assignment]


def prepare_chunks() -> None:
    """Stop at the gate in the second chunk that is read from a folder, or stored in one."""
    from kvstore.tiers.disk.inventory import Inventory
    from kvstore.tiers.disk.tier import DiskTier

    Inventory.read = gated(Inventory.read, 2)  # type: ignore[method-assign]
    DiskTier.put = gated(DiskTier.put, 2)  # type: ignore[method-assign]


def main() -> None:
    """Run the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    {"warm": prepare_warm, "bench": prepare_bench}.get(sys.argv[1], prepare_chunks)()
    cli.main()
