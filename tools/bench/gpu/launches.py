"""Kernels and copies that are launched for one chunk, counted in a profile that is kept as a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.bed import Bed
from kvstore.tools.bench.gpu.figures import COUNT, Figure
from kvstore.tools.bench.gpu.scale import Scale

CHUNKS = 10
MAX_KERNELS, MAX_COPIES = 1, 1 + 1 / CHUNKS  # a gather or a scatter; the payload, and one copy of all block addresses


def measure_launches(geometry: Geometry, scale: Scale, folder: Path) -> Iterator[Figure]:
    """Profile ten chunks each way, and write traces to ``folder``, for a browser's ``chrome://tracing``.

    Raises:
        BenchError: a path lost or changed a byte.
    """
    with closing(Bed(geometry, scale)) as bed:
        source = bed.new_batch()
        stores = bed.stores(0, source)
        bed.store(0, source)
        bed.check_slots(0)  # all kernels have been loaded
        yield from _profiled("out", lambda: bed.mover.store(_ten(stores)), bed, folder)
        target, _ = bed.workbench.destination()
        loads = bed.loads(0, target)
        yield from _profiled("in", lambda: bed.mover.load(_ten(loads)), bed, folder)


def _ten(jobs: list[Any]) -> list[Any]:
    return [jobs[number % len(jobs)] for number in range(CHUNKS)]


def _is_work(event: Any) -> bool:  # noqa: ANN401 - torch's
    """Tell if an event is a kernel or a copy, and not a user annotation."""
    return event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)


def _profiled(way: str, move: Callable[[], object], bed: Bed, folder: Path) -> Iterator[Figure]:
    activities = [ProfilerActivity.CPU]
    if bed.paged.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        move()
        bed.paged.streams.wait()
    profiled.export_chrome_trace(str(folder / f"gpu-trace-{way}.json.gz"))
    on_device = [event for event in profiled.events() or () if _is_work(event)]
    kinds = Counter("copies" if event.name.startswith("Mem") else "kernels" for event in on_device)
    names = Counter(event.name for event in on_device)
    figure = partial(Figure, unit=COUNT, goal=1.0, at_most=True, more={"launches": dict(names)})
    for kind, most in (("kernels", MAX_KERNELS), ("copies", MAX_COPIES)):
        each = kinds[kind] / CHUNKS
        yield figure(f"{kind} of a chunk {way}", each, most, each / most)
