"""Paths between a GPU and host memory, as a worker uses them, against pinned copies of as many bytes.

They go out, in and both ways at once, whole and layer by layer. Vllm's OffloadingConnector moves the same blocks.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from kvstore.paged.base import ChunkBlocks
from kvstore.paged.streams import DeviceEvent
from kvstore.tools.bench.geometry import GEOMETRIES, Geometry
from kvstore.tools.bench.gpu.bed import Bed, Scale
from kvstore.tools.bench.gpu.figures import COUNT, US, Figure, duration, speed
from kvstore.tools.bench.limits import PinnedCopies
from kvstore.tools.bench.samples import WARM_UP_ROUNDS, Pair, alternating, columns, require, sampled
from kvstore.transfer.layerwise import LayerLoad, LayerStore
from kvstore.transfer.mover import Mover

T = TypeVar("T")

ONE_WAY_GOALS = {"llama-8b": 0.90, "llama-70b-tp8": 0.85, "deepseek-mla": 0.85, "qwen-0.5b": 0.70}
BOTH_WAYS_GOAL = 0.85
PROFILED_CHUNKS = 10
# Launches for a chunk: a gather or a scatter; the payload, and one copy of all block addresses.
MOST_LAUNCHES = {"kernels": 1, "copies": 1 + 1 / PROFILED_CHUNKS}
_LONG_ROUNDS = 5  # comparing every byte takes longer than moving them
_OTHER_GOAL = 0.85  # of geometries not listed above
_PIECES_BYTES = tuple(1 << power for power in (16, 18, 20, 22))  # and MEMCPY_PIECE_BYTES, the limit itself


def measure_limit(scale: Scale) -> Iterator[Figure]:
    """Measure copies in smaller pieces, and both ways at once, against copies in one direction in pieces of 32 MiB."""
    whole = PinnedCopies(scale.batch_bytes, scale.device)

    def one_after_the_other() -> None:
        whole.to_host()
        whole.to_device()

    def measured(name: str, path: Callable[[], object], limit: Callable[[], object], times: int = 1) -> Figure:
        return speed(f"pinned copy {name}", sampled(limit, path, scale.rounds), times * scale.batch_bytes)

    yield measured("out", whole.to_host, whole.to_host)
    yield measured("in", whole.to_device, whole.to_device)
    yield measured("both at once, against one after the other", whole.both_ways, one_after_the_other, 2)
    for piece_bytes in _PIECES_BYTES:
        copies, title = PinnedCopies(scale.batch_bytes, scale.device, piece_bytes), f"pieces of {piece_bytes >> 10} KiB"
        yield measured(f"out in {title}", copies.to_host, whole.to_host)
        yield measured(f"in in {title}", copies.to_device, whole.to_device)


def measure_moves(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Measure every path of one geometry against pinned copies of as many bytes, and the host time of launches."""
    goal = ONE_WAY_GOALS.get(geometry.name, _OTHER_GOAL)
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        size_bytes = bed.workbench.batch_bytes
        copies = PinnedCopies(size_bytes, scale.device)
        ways = _one_way(bed, copies, scale.rounds)
        for name, pairs in ways.items():
            yield speed(f"{geometry.name}: {name}", pairs, size_bytes, goal if name in {"out", "in"} else None)
        threads = [opened.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]
        both = _both_ways(bed, copies, threads, scale.rounds)
        yield speed(f"{geometry.name}: both at once", both, 2 * size_bytes, BOTH_WAYS_GOAL)
        for way, samples in _issues(bed, scale).items():
            copy_s = median(pair.limit_s for pair in ways[way]) / bed.num_chunks  # slower launches limit the path
            for what, batch_s in zip(("host issue", "wall"), zip(*samples, strict=True), strict=True):
                chunk_s = [seconds / bed.num_chunks for seconds in batch_s]
                name = f"{geometry.name}: a chunk {way}, {what}"
                yield duration(name, median(chunk_s), copy_s, US, more={"samples_s": chunk_s})


def measure_long_moves(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Measure the paths of a long prompt, to which the fixed costs of a call matter less."""
    long = replace(scale, batch_bytes=scale.long_batch_bytes, rounds=min(scale.rounds, _LONG_ROUNDS))
    for figure in measure_moves(geometry, long):
        yield replace(figure, figure=f"long prompt, {figure.figure}")


def _one_way(bed: Bed, copies: PinnedCopies, rounds: int) -> dict[str, tuple[Pair, ...]]:
    """Measure out and in, whole and by layer, in turn; every byte is compared after each load."""
    found = []
    for pair in alternating(rounds):
        sample = []
        for by_layer, store, load in (
            ("", bed.mover.store, bed.mover.load),
            (" by layer", partial(_by_layer, LayerStore, bed.mover), partial(_by_layer, LayerLoad, bed.mover)),
        ):
            stores = bed.stores(0, bed.new_batch())
            out, refused = pair(copies.to_host, partial(_done, bed.mover, partial(store, stores)))
            require(not refused, f"{len(refused)} chunks were not stored{by_layer}")
            target, _ = bed.workbench.destination()
            loads = bed.loads(0, target)
            back, result = pair(copies.to_device, partial(_done, bed.mover, partial(load, loads)))
            require(not result.failed, f"{len(result.failed)} chunks were not loaded{by_layer}")
            bed.workbench.check(target)
            sample += [out, back]
        found.append(sample)
    return dict(zip(("out", "in", "out by layer", "in by layer"), columns(found), strict=True))


def _by_layer(kind: Callable[[Mover, Any], LayerStore | LayerLoad], mover: Mover, jobs: list[Any]) -> Any:  # noqa: ANN401 - either's
    moved = kind(mover, jobs)
    for layer in range(mover.paged.layout.num_layers):
        moved.move(layer)
    return moved.finish()


def _both_ways(bed: Bed, copies: PinnedCopies, threads: list[ThreadPoolExecutor], rounds: int) -> tuple[Pair, ...]:
    """Measure a store and a load on two threads at once, as when a worker saves and fetches during its steps."""
    saver, loader = bed.mover.for_thread(), bed.mover.for_thread()
    found = []
    for pair in alternating(rounds):
        source = bed.new_batch()
        bed.store(0, source)
        target = bed.workbench.other_blocks(source)
        event = bed.paged.streams.now()
        works: list[Callable[[], Any]] = [
            partial(_after, event, saver, partial(saver.store, bed.stores(1, source))),
            partial(_after, event, loader, partial(loader.load, bed.loads(0, target))),
        ]

        def move(works: list[Callable[[], Any]] = works) -> list[Any]:
            moving = [thread.submit(work) for thread, work in zip(threads, works, strict=True)]
            return [moved.result() for moved in moving]

        sample, (refused, result) = pair(copies.both_ways, move)
        require(not refused and not result.failed, "a chunk was not moved while another went the other way")
        bed.workbench.check(source, target)
        bed.check_slots(1)
        found.append([sample])
    return columns(found)[0]


def _after(event: DeviceEvent, mover: Mover, work: Callable[[], T]) -> T:
    mover.paged.streams.hold(event)
    return _done(mover, work)


def _done(mover: Mover, work: Callable[[], T]) -> T:
    """Run ``work`` and wait for its last copy, because a mover may return when all copies are launched."""
    result = work()
    mover.paged.streams.wait()
    return result


def _issues(bed: Bed, scale: Scale) -> dict[str, list[tuple[float, float]]]:
    """Measure the host time to launch a batch, and the time until all of it is done, for each way."""
    issues: dict[str, list[tuple[float, float]]] = {"out": [], "in": []}
    for _ in range(WARM_UP_ROUNDS + scale.rounds):
        source = bed.new_batch()
        scale.wait()
        issues["out"].append(_issued(bed, bed.paged.gather_chunks, source))
        target, _ = bed.workbench.destination()
        scale.wait()
        issues["in"].append(_issued(bed, bed.paged.scatter_chunks, target))
        bed.workbench.check(target)
    return {way: found[WARM_UP_ROUNDS:] for way, found in issues.items()}


def _issued(bed: Bed, launch: Callable[[list[ChunkBlocks]], object], block_ids: torch.Tensor) -> tuple[float, float]:
    places = list(zip(bed.of_chunks(block_ids), bed.payloads(0), strict=True))
    begin_s = perf_counter()
    launch([bed.paged.chunk(ids, payload) for ids, payload in places])
    issued_s = perf_counter()
    bed.paged.streams.wait()
    return issued_s - begin_s, perf_counter() - begin_s


def measure_launches(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Count the launches of ten chunks each way in a profile, kept in a file for ``chrome://tracing``."""
    with closing(Bed(geometry, scale)) as bed:
        source = bed.new_batch()
        stores = bed.stores(0, source)
        bed.store(0, source)
        bed.check_slots(0)  # all kernels have been loaded
        yield from _profiled("out", partial(bed.mover.store, _ten(stores)), bed, scale.folder)
        target, _ = bed.workbench.destination()
        loads = bed.loads(0, target)
        yield from _profiled("in", partial(bed.mover.load, _ten(loads)), bed, scale.folder)


def _ten(jobs: list[T]) -> list[T]:
    return [jobs[number % len(jobs)] for number in range(PROFILED_CHUNKS)]


def _profiled(way: str, move: Callable[[], object], bed: Bed, folder: Path) -> Iterator[Figure]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bed.paged.device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        move()
        bed.paged.streams.wait()
    profiled.export_chrome_trace(str(folder / f"gpu-trace-{way}.json.gz"))
    names = Counter(event.name for event in profiled.events() or () if _is_work(event))
    for kind, most in MOST_LAUNCHES.items():
        launches = sum(times for name, times in names.items() if name.startswith("Mem") == (kind == "copies"))
        each, more = launches / PROFILED_CHUNKS, {"launches": dict(names)}
        yield Figure(f"{kind} of a chunk {way}", each, most, each / most, COUNT, 1.0, at_most=True, more=more)


def _is_work(event: Any) -> bool:  # noqa: ANN401 - torch's
    """Tell if an event is a kernel or a copy, and not a user annotation."""
    return event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)


def why_no_offloading(scale: Scale) -> str | None:
    """Return the reason why vLLM's copies cannot be measured here; None if they can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None if scale.is_cuda else "vLLM's copies need a GPU"


def measure_offloading(scale: Scale) -> Iterator[Figure]:
    """Measure, for every geometry, our moves against vLLM's copies, and vLLM's copies against pinned copies."""
    for geometry in GEOMETRIES.values():
        yield from _offloaded(geometry, scale)


def _offloaded(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    from kvstore.adapters.vllm.offline.offloading import OffloadingCopies  # noqa: PLC0415 - imports vLLM

    found = []
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        blocks_per_chunk = bed.workbench.geometry.blocks_per_chunk
        copies = OffloadingCopies(bed.workbench.caches, blocks_per_chunk, bed.num_chunks)
        theirs = opened.enter_context(closing(copies))
        pinned = PinnedCopies(bed.workbench.batch_bytes, scale.device)
        for pair in alternating(scale.rounds):
            source = bed.new_batch()
            store = partial(theirs.store, source.tolist())
            sample = [pair(store, partial(bed.store, 0, source))[0], pair(pinned.to_host, store)[0]]
            for is_ours in (False, True):
                target, _ = bed.workbench.destination()
                load = partial(theirs.load, target.tolist())
                loaded = pair(load, partial(bed.load, 0, target)) if is_ours else pair(pinned.to_device, load)
                bed.workbench.check(target)
                sample.insert(2, loaded[0])
            found.append(sample)
        samples = columns(found)
        for number, way in ((0, "out"), (2, "in")):
            name, size_bytes = f"{geometry.name}: ", bed.workbench.batch_bytes
            yield speed(f"{name}ours {way} against vLLM's copies", samples[number], size_bytes)
            yield speed(f"{name}vLLM's copies {way}", samples[number + 1], size_bytes)
