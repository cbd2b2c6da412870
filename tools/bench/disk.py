"""Bench lines of the disk tier, over recycled files, with a memory pool that keeps no chunk.

Cold reads and writes bypass the page cache, in the path and in its limit. Warm reads hit the page cache. Their limit is
the work that no reader can avoid: copying the bytes out of the cache, and computing the checksum of the copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions
from kvstore.format import chunkfile
from kvstore.tools.bench import moves
from kvstore.tools.bench.limits import RawDisk
from kvstore.tools.bench.lines import Line, Subject, move_lines
from kvstore.tools.bench.samples import NAMESPACE, WARM_UP_ROUNDS, Pair, Pairing, Tick, alternating, require, timed
from kvstore.tools.bench.workbench import Workbench

WRITE = Subject("disk write-behind", "O_DIRECT write", "store and flush: gather, xxh3, O_DIRECT, naming the files")
COLD = Subject("disk cold retrieve", "O_DIRECT read", "O_DIRECT read, xxh3 verified, scatter")
LAYERS = Subject("disk layerwise retrieve", "load or compute", "O_DIRECT read by layers, xxh3 verified, scatter")
WARM = Subject("disk warm retrieve", "memcpy + xxh3", "buffered read of cached files, xxh3 verified, scatter")
QUARTER = Subject("disk: a chunk for its quarter", "its leading quarter", "O_DIRECT, no tier: the whole against a part")
_LOADS_PER_ROUND = 3  # whole, layer by layer, and layer by layer while computing
_TIMEOUT_S = 120.0


def measure_disk(workbench: Workbench, rounds: int, tick: Tick, folder: Path) -> list[Line]:
    """Measure write-behind, cold and warm retrieves, loads layer by layer, and the gain of reading part of a chunk."""
    direct = []
    layout, chunks, times = workbench.paged.layout, workbench.num_chunks, WARM_UP_ROUNDS + rounds
    with _opened(workbench, folder / "direct", use_odirect=True, batches=times) as engine:
        with closing(RawDisk(folder / "raw", layout, chunks, EngineOptions(0).disk_io_threads)) as raw:
            for pair in alternating(rounds, tick):
                written = moves.store_and_flush(engine, workbench, raw.write, pair)
                read = moves.retrieve(engine, workbench, raw.read, pair)
                quarter, _ = pair(raw.read_quarter, raw.read)
                direct.append((written, read, _retrieve_while_computing(engine, workbench), quarter))
                engine.clear(workbench.tokens)  # by tokens: their files are recycled by the next round
        _require_loads(engine, _LOADS_PER_ROUND * times * chunks)
    with _opened(workbench, folder / "buffered", use_odirect=False, batches=1) as engine:
        moves.store_and_flush(engine, workbench, workbench.memcpy, Pairing(limit_first=True))
        buffered = [
            [moves.retrieve(engine, workbench, workbench.memcpy_and_sum, pair)] for pair in alternating(rounds, tick)
        ]
        _require_loads(engine, times * chunks)
    return move_lines((WRITE, COLD, LAYERS, QUARTER), direct, workbench) + move_lines((WARM,), buffered, workbench)


@contextmanager
def _opened(workbench: Workbench, folder: Path, *, use_odirect: bool, batches: int) -> Iterator[CacheEngine]:
    """Yield an engine over a folder with room for two batches, and check at the end that it wrote ``batches``."""
    layout, chunks = workbench.paged.layout, workbench.num_chunks
    options = EngineOptions(
        max_local_cpu_bytes=workbench.pool_bytes,
        local_cpu=False,
        local_disk=folder,
        max_local_disk_bytes=2 * chunks * chunkfile.file_bytes(layout, layout.blocks_per_chunk),
        use_odirect=use_odirect,
        io_timeout_s=_TIMEOUT_S,
        max_write_queue=chunks,
    )
    with CacheEngine(workbench.paged, NAMESPACE, options) as engine:
        yield engine
        written = engine.stats().index.writes_done
        require(written == batches * chunks, f"{written} of {batches * chunks} chunks were written to disk")


def _require_loads(engine: CacheEngine, loads: int) -> None:
    from_disk = engine.stats().mover.chunks_loaded_from_disk
    require(from_disk == loads, f"{from_disk} of {loads} chunks were read from disk")


def _retrieve_while_computing(engine: CacheEngine, workbench: Workbench) -> Pair:
    """Load the batch twice: as fast as possible, then with each layer computed for as long as a layer took to load.

    The limit is the larger of the total load time and the total compute time, as if the smaller were completely hidden.
    """
    load_s, _ = _load(engine, workbench, 0.0)
    path_s, compute_s = _load(engine, workbench, load_s / workbench.paged.layout.num_layers)
    return Pair(max(load_s, compute_s), path_s)


def _load(engine: CacheEngine, workbench: Workbench, layer_s: float) -> tuple[float, float]:
    """Load the batch with ``layer_s`` of computing after each layer; return total seconds and those of computing."""
    block_ids, slots = workbench.destination()
    compute_s, loaded = 0.0, None
    begin_s = time.perf_counter()
    for loaded in engine.retrieve_layer(workbench.tokens, slot_mapping=slots):
        if loaded is None and layer_s:  # a thread that waits for a device sleeps as well
            compute_s += timed(lambda: time.sleep(layer_s))[0]
    total_s = time.perf_counter() - begin_s
    is_whole = loaded is not None and bool(loaded.all())
    require(is_whole, "a load layer by layer did not bring all tokens: is another bench running in this folder?")
    workbench.check(block_ids)
    return total_s, compute_s
