"""Comparison with vLLM's OffloadingConnector, on the same caches in the same run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

from kvstore.tools.bench.geometry import GEOMETRIES, Geometry
from kvstore.tools.bench.gpu.bed import Bed
from kvstore.tools.bench.gpu.copies import PinnedCopies
from kvstore.tools.bench.gpu.figures import Figure, speed
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.samples import WARM_UP_ROUNDS, Limit, Pair, paired


def why_not(scale: Scale) -> str | None:
    """Return the reason why vLLM's copies cannot be measured here; None if they can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None if scale.is_cuda else "vLLM's copies need a GPU"


def measure_offloading(scale: Scale) -> Iterator[Figure]:
    """Measure, for every geometry, our moves against vLLM's copies, and vLLM's copies against pinned copies.

    Raises:
        BenchError: a path lost or changed a byte.
    """
    for geometry in GEOMETRIES.values():
        yield from _measure(geometry, scale)


def _measure(geometry: Geometry, scale: Scale) -> Iterator[Figure]:
    from kvstore.adapters.vllm.offline.offloading import OffloadingCopies  # noqa: PLC0415 - imports vLLM

    with ExitStack() as opened:
        bed = opened.enter_context(closing(Bed(geometry, scale)))
        blocks_per_chunk = bed.workbench.geometry.blocks_per_chunk
        copies = OffloadingCopies(bed.workbench.caches, blocks_per_chunk, bed.num_chunks)
        theirs = opened.enter_context(closing(copies))
        pinned = PinnedCopies(bed.workbench.batch_bytes, scale.device)
        samples: dict[str, list[Pair]] = {"ours": [], "theirs": []}
        back: dict[str, list[Pair]] = {"ours": [], "theirs": []}
        for number in range(WARM_UP_ROUNDS + scale.rounds):
            limit_first = number % 2 == 0
            source = bed.new_batch()
            store = partial(theirs.store, source.tolist())
            samples["ours"].append(_timed(store, partial(bed.store, 0, source), limit_first=limit_first))
            samples["theirs"].append(_timed(pinned.to_host, store, limit_first=limit_first))
            target, _ = bed.workbench.destination()
            load = partial(theirs.load, target.tolist())
            back["theirs"].append(_timed(pinned.to_device, load, limit_first=limit_first))
            bed.workbench.check(target)
            target, _ = bed.workbench.destination()
            load = partial(theirs.load, target.tolist())
            back["ours"].append(_timed(load, partial(bed.load, 0, target), limit_first=limit_first))
            bed.workbench.check(target)
        size_bytes = bed.workbench.batch_bytes
        for way, found in (("out", samples), ("in", back)):
            ours, others = (pairs[WARM_UP_ROUNDS:] for pairs in (found["ours"], found["theirs"]))
            yield speed(f"{geometry.name}: ours {way} against vLLM's copies", ours, size_bytes)
            yield speed(f"{geometry.name}: vLLM's copies {way}", others, size_bytes)


def _timed(limit: Limit, path: Limit, *, limit_first: bool) -> Pair:
    return paired(limit, path, limit_first=limit_first)[0]
