"""Paths between a GPU and host memory, as a worker uses them: out, in, both at once, whole and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch

from kvstore.paged.base import ChunkBlocks
from kvstore.paged.streams import Moment
from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.gpu.bed import Bed
from kvstore.tools.bench.gpu.copies import PinnedCopies
from kvstore.tools.bench.gpu.figures import US, Figure, duration, speed
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.samples import WARM_UP_ROUNDS, Pair, paired, require
from kvstore.transfer.layerwise import LayerLoad, LayerStore
from kvstore.transfer.mover import LoadJob, LoadResult, Mover, StoreJob

T = TypeVar("T")

ONE_WAY_GOALS = {"llama-8b": 0.90, "llama-70b-tp8": 0.85, "deepseek-mla": 0.85, "qwen-0.5b": 0.70}
BOTH_WAYS_GOAL = 0.85
_OTHER_GOAL = 0.85  # of geometries not listed above


class Issue(NamedTuple):
    """Seconds until everything was launched, and until it was done."""

    host_s: float
    wall_s: float


def measure_moves(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    """Measure every path of one geometry against pinned copies of as many bytes, and the host time of launches.

    Raises:
        BenchError: a path lost or changed a byte.
    """
    goal = ONE_WAY_GOALS.get(geometry.name, _OTHER_GOAL)
    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        copies = PinnedCopies(bed.workbench.batch_bytes, scale.device)
        ways = _one_way(bed, copies, scale.rounds)
        size_bytes = bed.workbench.batch_bytes
        for name, pairs in ways.items():
            yield speed(f"{geometry.name}: {name}", pairs, size_bytes, goal if name in {"out", "in"} else None)
        threads = [opened.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]
        both = _both_ways(bed, copies, threads, scale.rounds)
        yield speed(f"{geometry.name}: both at once", both, 2 * size_bytes, BOTH_WAYS_GOAL)
        for way, issues in _issues(bed, scale).items():
            yield from _issue_figures(f"{geometry.name}: a chunk {way}", issues, bed, ways[way])


def _one_way(bed: Bed, copies: PinnedCopies, rounds: int) -> dict[str, list[Pair]]:
    """Measure out and in, whole and by layer, in turn; every byte is compared after each load."""
    samples: dict[str, list[Pair]] = {"out": [], "in": [], "out by layer": [], "in by layer": []}
    for number in range(WARM_UP_ROUNDS + rounds):
        timed = partial(paired, limit_first=number % 2 == 0)
        for by_layer in ("", " by layer"):
            source = bed.new_batch()
            stores = bed.stores(0, source)
            store = partial(_store_layers if by_layer else Mover.store, bed.mover, stores)
            pair, refused = timed(copies.to_host, partial(_done, bed.mover, store))
            require(not refused, f"{len(refused)} chunks were not stored{by_layer}")
            samples[f"out{by_layer}"].append(pair)
            target, _ = bed.workbench.destination()
            loads = bed.loads(0, target)
            load = partial(_load_layers if by_layer else Mover.load, bed.mover, loads)
            pair, result = timed(copies.to_device, partial(_done, bed.mover, load))
            require(not result.failed, f"{len(result.failed)} chunks were not loaded{by_layer}")
            bed.workbench.check(target)
            samples[f"in{by_layer}"].append(pair)
    return {name: pairs[WARM_UP_ROUNDS:] for name, pairs in samples.items()}


def _store_layers(mover: Mover, jobs: list[StoreJob]) -> set[bytes]:
    store = LayerStore(mover, jobs)
    for layer in range(mover.paged.layout.num_layers):
        store.move(layer)
    return store.finish()


def _load_layers(mover: Mover, jobs: list[LoadJob]) -> LoadResult:
    load = LayerLoad(mover, jobs)
    for layer in range(mover.paged.layout.num_layers):
        load.move(layer)
    return load.finish()


def _both_ways(bed: Bed, copies: PinnedCopies, threads: list[ThreadPoolExecutor], rounds: int) -> list[Pair]:
    """Measure a store and a load on two threads at once, as when a worker saves and fetches during its steps."""
    saver, loader = bed.mover.for_thread(), bed.mover.for_thread()
    pairs = []
    for number in range(WARM_UP_ROUNDS + rounds):
        source = bed.new_batch()
        bed.store(0, source)
        target = bed.workbench.other_blocks(source)
        stores, loads = bed.stores(1, source), bed.loads(0, target)
        moment = bed.paged.streams.now()

        def move() -> tuple[set[bytes], LoadResult]:
            saving = threads[0].submit(_after, moment, saver, lambda: saver.store(stores))  # noqa: B023 - awaited below
            loading = threads[1].submit(_after, moment, loader, lambda: loader.load(loads))  # noqa: B023
            return saving.result(), loading.result()

        pair, (refused, result) = paired(copies.both_ways, move, limit_first=number % 2 == 0)
        require(not refused and not result.failed, "a chunk was not moved while another went the other way")
        bed.workbench.check(source, target)
        bed.check_slots(1)
        pairs.append(pair)
    return pairs[WARM_UP_ROUNDS:]


def _after(moment: Moment, mover: Mover, work: Callable[[], T]) -> T:
    mover.paged.streams.hold(moment)
    return _done(mover, work)


def _done(mover: Mover, work: Callable[[], T]) -> T:
    """Run ``work`` and wait for its last copy, because a mover may return when all copies are launched."""
    result = work()
    mover.paged.streams.wait()
    return result


def _issues(bed: Bed, scale: Scale) -> dict[str, list[Issue]]:
    """Measure the host time to launch a batch, and the time until all of it is done, for each way."""
    issues: dict[str, list[Issue]] = {"out": [], "in": []}
    for _ in range(WARM_UP_ROUNDS + scale.rounds):
        source = bed.new_batch()
        scale.wait()
        issues["out"].append(_issued(bed, bed.paged.gather_chunks, source))
        target, _ = bed.workbench.destination()
        scale.wait()
        issues["in"].append(_issued(bed, bed.paged.scatter_chunks, target))
        bed.workbench.check(target)
    return {way: found[WARM_UP_ROUNDS:] for way, found in issues.items()}


def _issued(bed: Bed, launch: Callable[[list[ChunkBlocks]], object], block_ids: torch.Tensor) -> Issue:
    places = list(zip(bed.of_chunks(block_ids), bed.payloads(0), strict=True))
    begin_s = perf_counter()
    launch([bed.paged.chunk(ids, payload) for ids, payload in places])
    issued_s = perf_counter()
    bed.paged.streams.wait()
    return Issue(issued_s - begin_s, perf_counter() - begin_s)


def _issue_figures(name: str, issues: list[Issue], bed: Bed, pairs: list[Pair]) -> Iterator[Figure]:
    """Yield host time and wall time per chunk, against the time of its pinned copy.

    If the host time exceeds the copy's, launches limit the path.
    """
    copy_s = median(pair.limit_s for pair in pairs) / bed.num_chunks
    for what, samples_s in (
        ("host issue", [issue.host_s / bed.num_chunks for issue in issues]),
        ("wall", [issue.wall_s / bed.num_chunks for issue in issues]),
    ):
        yield duration(f"{name}, {what}", median(samples_s), copy_s, US, more={"samples_s": samples_s})
