"""Trials of Triton's kernels in a separate process, because Triton is installed outside the environment.

The kernels are compiled for a GPU that need not be present, because the interpreter also accepts Python that Triton
does not. Then they are interpreted on the CPU, and must do to every layout what PyTorch's indexing does.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from kvstore.paged import kernels
from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.kernels import Kernels, TorchKernels, TritonKernels
from kvstore.paged.planes import find_planes
from kvstore.paged.streams import Streams
from kvstore.transfer.mover import as_block_ids
from support.layouts import LAYOUTS, B, N, Paged, empty, snapshot

CHUNK_BLOCKS = 3
BYTES = (torch.float8_e4m3fn, torch.uint8)


def odd(shift: int, gap: int, length: int) -> Paged:
    """Return blocks of one plane that begin at odd places and have odd gaps."""
    store = empty((B * (length + gap) + shift,), torch.uint8)
    return Paged({"l": store.as_strided((B, length), (length + gap, 1), shift)})


def cases(*, with_every_width: bool) -> Iterator[tuple[str, Callable[[], Paged]]]:
    """Yield each layout with elements of one byte or of two, or with both."""
    for number, (name, make) in enumerate(LAYOUTS.items()):
        for width, dtype in enumerate((torch.bfloat16, BYTES[number // 2 % 2])):
            if with_every_width or width == number % 2:
                yield f"{name}, {dtype}", partial(make, dtype)
    for shift, gap, length in ((3, 5, 7), (1, 0, 4096), (0, 16, 48), (8, 8, 40), (0, 0, 40_000), (2, 4, 9_002)):
        yield f"{shift} + {length} + {gap}", partial(odd, shift, gap, length)
    yield (
        "planes of several sizes",
        lambda: Paged(
            {"a": empty((B, 9), torch.uint8), "b": empty((B, 5_000), torch.uint8), "c": empty((B, 1), torch.uint8)}
        ),
    )


def bind(paged: Paged, make: Callable[[list[torch.Tensor], Streams], Kernels]) -> DevicePagedKV:
    layout = bind_paged_kv(paged.caches, num_blocks=B, block_tokens=N, chunk_tokens=CHUNK_BLOCKS * N).layout
    planes = [find_planes(name, cache, B) for name, cache in paged.caches.items()]
    bound = DevicePagedKV(planes, layout, B, staging_bytes=2 * layout.slot_bytes)
    rows = [plane.rows for layer in planes for plane in layer]
    word = min((part.dtype for part in rows), key=lambda dtype: dtype.itemsize)
    bound._kernels = make([part.view(word) for part in rows], bound.streams)
    return bound


def moved(bound: DevicePagedKV, paged: Paged, seed: int) -> list[bytes]:
    """Gather and scatter some chunks, whole and by layer. Returns all bytes of payloads and caches."""
    dice = random.Random(seed)
    payloads = [np.full(bound.layout.slot_bytes, 0xEE, np.uint8) for _ in range(4)]
    free = dice.sample(range(B), B)
    chunks = [bound.chunk(as_block_ids([free.pop() for _ in range(n)]), payloads[n]) for n in (3, 2, 1)]
    bound.gather_chunks(chunks)
    bound.gather(as_block_ids([free.pop()]), payloads[0])
    targets = [
        bound.chunk(as_block_ids([5, 1]), payloads[3], 3, 1),
        bound.chunk(as_block_ids([8]), payloads[2], 2, 0),
        bound.chunk(as_block_ids([]), payloads[2], 2, 1),
        bound.chunk(as_block_ids([3, 4, 0]), payloads[3], 3, 0),
    ]
    bound.scatter_chunks(targets)
    for layers in bound.layout.layer_groups(seed % 3 * chunks[0].payload.nbytes // 3):
        bound.gather_layers(layers, [bound.chunk(as_block_ids([6, 2]), payloads[0], 3, 1), *chunks[:2]])
        bound.scatter_layers(layers, [bound.chunk(as_block_ids([7, 9]), payloads[0], 3, 1), targets[1]])
    on_device = torch.zeros(bound.layout.slot_bytes, dtype=torch.uint8)
    bound.gather_on_device(as_block_ids([2, 11]), on_device)
    bound.scatter_on_device(as_block_ids([10]), on_device, 2, 1)
    return [*(payload.tobytes() for payload in payloads), *snapshot(paged)]


def interpret(*, with_every_width: bool = False) -> None:
    """Compare the interpreted kernels with PyTorch's."""
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

    # An overflow check of each sum takes as long as all else, and these numbers are far too small for one.
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
    kernels._move = InterpretedFunction(kernels._move.fn)
    for number, (name, make) in enumerate(cases(with_every_width=with_every_width)):
        results = []
        for make_kernels in (lambda rows, _: TorchKernels(rows), TritonKernels):
            paged = make()
            paged.fill(number)
            before = snapshot(paged)
            bound = bind(paged, make_kernels)
            if isinstance(bound._kernels, TritonKernels):
                bound._kernels.warm_up(bound._staging.buffers[0])
                bound._kernels._table.fill_(0)  # as when vLLM sleeps, although the contents may be anything then
                bound.restore()
            assert snapshot(paged) == before, f"{name}: warming up changes the cache"
            results.append(moved(bound, paged, number))
        assert results[0] == results[1], f"{name}: other bytes than PyTorch's"
        assert results[0][4:] != before, name
        print(f"same bytes: {name}")


def compile_for_a_gpu() -> None:
    """Compile for compute capability 9.0: the widest words and the narrowest, both ways."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as build

    for word, vector in (("i64", 2), ("i64", 1), ("i8", 1)):
        for is_gather in (True, False):
            signature = {"table": "*i64", "places": "*i64", "staged": f"*{word}", "row_words": "i32"}
            signature |= {"first_plane": "i32", "is_gather": "constexpr", "vector": "constexpr", "words": "constexpr"}
            constants = {(5,): is_gather, (6,): vector, (7,): 2048}
            source = ASTSource(fn=kernels._move, signature=signature, constexprs=constants)
            built = build(source, target=GPUTarget("cuda", 90, 32))
            operations = Counter(re.findall(r"(?:ld|st)\.global\.v2\.b64", built.asm["ptx"]))
            assert bool(operations) == (vector > 1), f"{word}, {vector} at once: {operations}"
            print(f"compiled: {word}, {'gather' if is_gather else 'scatter'}, {operations}")


if __name__ == "__main__":
    compile_for_a_gpu()
    interpret(with_every_width="all" in sys.argv)
