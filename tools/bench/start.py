"""Bench lines of startup: importing the library, and opening an engine over a large pool. The limits are targets."""

from __future__ import annotations

import subprocess
import sys

from kvstore.engine import CacheEngine
from kvstore.options import EngineOptions
from kvstore.tools.bench.geometry import GEOMETRIES
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import NAMESPACE, Pair, Tick, require, timed
from kvstore.tools.bench.workbench import Workbench

POOL_BYTES = 4 << 30
IMPORT = Subject("import kvstore", "0.5 s", "engine and binding, in a new process that has torch")
ENGINE = Subject("engine start, pool of 4 GiB", "1 s", "CacheEngine; the pool is populated behind")
_GEOMETRY = GEOMETRIES["qwen-0.5b"]
_TIMEOUT_S = 120.0
_CODE = """
import time, torch
begin_s = time.perf_counter()
import kvstore.engine, kvstore.paged.binding
print(time.perf_counter() - begin_s)
"""


def measure_start(rounds: int, tick: Tick) -> list[Line]:
    """Import the library and open an engine, once per round.

    Raises:
        BenchError: the import failed.
        ConfigError: there is too little memory.
    """
    workbench = Workbench(_GEOMETRY, 1)
    imports, starts = [], []
    for _ in range(rounds):
        tick("start")
        imports.append(Pair(0.5, _import_s()))
        seconds, engine = timed(lambda: CacheEngine(workbench.paged, NAMESPACE, EngineOptions(POOL_BYTES)))
        engine.close()
        starts.append(Pair(1.0, seconds))
    return [IMPORT.line(_GEOMETRY, imports), ENGINE.line(_GEOMETRY, starts)]


def _import_s() -> float:
    done = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    require(done.returncode == 0, f"kvstore cannot be imported: {done.stderr[-1000:]}")
    return float(done.stdout)
