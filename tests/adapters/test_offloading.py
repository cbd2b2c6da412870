"""Copies of vLLM's OffloadingConnector, with which the bench compares, on a simulated GPU.

vLLM's own code makes the descriptors of every copy; only the device, its streams and the copy itself are replaced.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.cpu import gpu_worker

from kvstore.adapters.vllm.offline.offloading import OffloadingCopies
from kvstore.tools.bench.geometry import GEOMETRIES
from kvstore.tools.bench.gpu import moves
from kvstore.tools.bench.gpu.bed import make_scale

pytestmark = pytest.mark.vllm

BLOCKS, PAGE, BLOCKS_PER_CHUNK, CHUNKS = 32, (16, 2, 8), 4, 3


class OnDevice(torch.Tensor):
    """A tensor in host memory that claims to be on a GPU."""

    is_cuda = True


class Stream:
    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...


class Event:
    def __init__(self, **_options: bool) -> None: ...

    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _end: object) -> float:
        return 1.0


def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **_options: bool) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda _stream: nullcontext(),
        is_xpu=lambda: False,
        is_rocm=lambda: False,
        is_cuda_alike=lambda: True,
    )
    fake_torch: Any = SimpleNamespace(**{name: getattr(torch, name) for name in ("int8", "int64", "empty", "zeros")})
    fake_torch.Event = Event
    monkeypatch.setattr(gpu_worker, "torch", fake_torch)
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker.ops, "swap_blocks_batch", copy)
    monkeypatch.setattr(gpu_worker, "_select_swap_blocks_fn", lambda *_: copy)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", False)


def test_what_is_stored_comes_back_to_other_blocks() -> None:
    caches = [torch.randn(BLOCKS, *PAGE).to(torch.bfloat16).as_subclass(OnDevice) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    copies = OffloadingCopies(caches, BLOCKS_PER_CHUNK, CHUNKS)
    order = torch.randperm(BLOCKS)[: 2 * BLOCKS_PER_CHUNK * CHUNKS].tolist()
    sources, targets = order[: BLOCKS_PER_CHUNK * CHUNKS], order[BLOCKS_PER_CHUNK * CHUNKS :]
    copies.store(sources)
    for cache in caches:
        cache[sources] = 0
    copies.load(targets)
    copies.close()
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[targets], old[sources])


def test_ours_and_theirs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "GEOMETRIES", {"qwen-0.5b": GEOMETRIES["qwen-0.5b"]})
    made = OffloadingCopies.__init__

    def on_device(copies: OffloadingCopies, caches: list[torch.Tensor], *sizes: int) -> None:
        made(copies, [cache.as_subclass(OnDevice) for cache in caches], *sizes)

    monkeypatch.setattr(OffloadingCopies, "__init__", on_device)
    found = list(moves.measure_offloading(make_scale(torch.device("cpu"), small=True)))
    names = [name for way in ("out", "in") for name in (f"ours {way} against vLLM's copies", f"vLLM's copies {way}")]
    assert [figure.figure for figure in found] == [f"qwen-0.5b: {name}" for name in names]
    assert all(figure.ratio > 0 for figure in found)
