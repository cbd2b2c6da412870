"""Steps of a GPU run, with their time limits.

A step is a function of this library that yields figures, or a program. Each runs in a separate process.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.tools.bench.geometry import GEOMETRIES
from kvstore.tools.bench.gpu.bed import Scale
from kvstore.tools.bench.gpu.figures import Figure
from kvstore.tools.bench.gpu.moves import (
    measure_launches,
    measure_limit,
    measure_long_moves,
    measure_moves,
    measure_offloading,
    why_no_offloading,
)
from kvstore.tools.bench.gpu.order import check_broken_order, check_order
from kvstore.tools.bench.gpu.pinning import check_captures, find_collisions, measure_pinning
from kvstore.tools.bench.gpu.traffic import check_stress, measure_beside

MODULE = "kvstore.tools.bench.gpu"
VISIT_S = 25 * 60.0
GPU_TESTS = (
    "tests/unit/paged",
    "tests/unit/memory",
    "tests/conformance/test_gpu_streams.py",
    "tests/conformance/test_gpu_paths.py",
)
_SMALLEST = "moves-qwen-0.5b"  # run by kernel checkers and profilers, which make everything slow
Measure = Callable[[Scale], Iterator[Figure]]


@dataclass(frozen=True)
class Step:
    """Step of a GPU run.

    Attributes:
        name: as ``--only`` takes it.
        limit_s: seconds after which it is killed.
        measure: yields its figures; None for a program.
        program: returns its command line, given the folder for files.
        needs: program that must be on the PATH.
        why_not: returns the reason why it cannot run on a device; None if it can.
        is_question: whether it only explores the driver's behaviour, so that no result counts as a failure.
    """

    name: str
    limit_s: float
    measure: Measure | None = None
    program: Callable[[Path], list[str]] | None = None
    needs: str | None = None
    why_not: Callable[[Scale], str | None] = lambda _: None
    is_question: bool = False

    def hindrance(self, scale: Scale) -> str | None:
        """Return the reason why the step cannot run here; None if it can."""
        if self.needs is not None and shutil.which(self.needs) is None:
            return f"{self.needs} is not on the PATH"
        return self.why_not(scale)


def _needs_cuda(scale: Scale) -> str | None:
    return None if scale.is_cuda else "needs a device that works late"


def _small(tool: list[str]) -> list[str]:
    return [*tool, sys.executable, "-m", MODULE, "one", _SMALLEST, "--small"]


def _ncu(folder: Path) -> list[str]:
    log = str(folder / "gpu-ncu.txt")
    ours = ["--kernel-name", "regex:move|index", "--launch-count", "20"]
    return _small(["ncu", "--clock-control", "none", "--set", "basic", *ours, "--log-file", log])


def _sanitizer(tool: str) -> Step:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    return Step(tool, 100, program=lambda _: _small(command), needs="compute-sanitizer", why_not=_needs_cuda)


_LLAMA, _QWEN = GEOMETRIES["llama-8b"], GEOMETRIES["qwen-0.5b"]
_PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *GPU_TESTS]
_TESTS = Step("tests", 150, program=lambda _: _PYTEST)
_CHECKS = [
    _TESTS,
    Step("capture", 60, partial(check_captures, "global")),
    Step("capture-relaxed", 60, partial(check_captures, "relaxed")),
    Step("order", 60, check_order),
    Step("order-broken", 60, check_broken_order, why_not=_needs_cuda),
    Step("stress", 60, partial(check_stress, _QWEN)),
    _sanitizer("memcheck"),
    _sanitizer("racecheck"),
]
_SPEED = [
    Step("limit", 40, measure_limit),
    *(Step(f"moves-{name}", 60, partial(measure_moves, geometry)) for name, geometry in GEOMETRIES.items()),
    Step("long-llama-8b", 120, partial(measure_long_moves, _LLAMA)),
    *(Step(f"beside-{name}", 45, partial(measure_beside, geometry)) for name, geometry in GEOMETRIES.items()),
    Step("pinning", 50, measure_pinning),
]
_VLLM = Step("offloading", 300, measure_offloading, why_not=why_no_offloading)
_AGAIN = [
    Step("launches", 40, partial(measure_launches, _LLAMA)),
    Step("ncu", 80, program=_ncu, needs="ncu", why_not=_needs_cuda),
    Step("collisions", 60, find_collisions, is_question=True),  # last: it may hang the driver
]

PLANS = {"bench": [_TESTS, *_SPEED, _VLLM], "visit": [*_CHECKS, *_SPEED, *_AGAIN]}
STEPS = {step.name: step for plan in PLANS.values() for step in plan}
