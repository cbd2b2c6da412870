"""Pinning during a capture of CUDA graphs, on a fake CUDA."""

from __future__ import annotations

import pytest
import torch
from support.fake_cuda import GLOBAL, OUT_OF_MEMORY, UNSUPPORTED, FakeCuda

from kvstore.memory.pinning import CudaPinner, Refusal, find_pinner

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    return cuda


def test_a_cpu_needs_no_pinned_memory() -> None:
    assert find_pinner(torch.device("cpu")) is None


@pytest.mark.parametrize("hangs", [False, True])
def test_memory_is_pinned_beside_a_capture_and_leaves_it_whole(cuda: FakeCuda, hangs: bool) -> None:
    pinner = CudaPinner(GPU, cuda.runtime())
    assert pinner.is_safe_during_captures
    cuda.capturing, cuda.hangs = True, hangs
    assert pinner.pin(4096, 8192) is None
    assert cuda.registered == {4096: 8192}
    pinner.unpin(4096)
    assert not cuda.registered
    assert (cuda.broken, cuda.mode()) == (0, GLOBAL)


def test_without_the_runtime_a_capture_is_in_the_way(cuda: FakeCuda) -> None:
    pinner = CudaPinner(GPU, None)
    assert not pinner.is_safe_during_captures
    cuda.capturing = True
    assert pinner.pin(4096, 8192) == Refusal("cudaHostRegister returned error 900", may_pass=True)
    cuda.end_capture()
    assert pinner.pin(4096, 8192) is None


@pytest.mark.parametrize(
    ("error", "may_pass"), [(OUT_OF_MEMORY, False), (UNSUPPORTED, True), (908, True), (909, False)]
)
def test_what_fails_leaves_no_error_for_torch_to_raise(cuda: FakeCuda, error: int, may_pass: bool) -> None:
    pinner = CudaPinner(GPU, cuda.runtime())
    cuda.error = error
    assert pinner.pin(4096, 8192) == Refusal(f"cudaHostRegister returned error {error}", may_pass)
    assert cuda.take_error() == 0
    pinner.unpin(12288)  # was never pinned
    assert cuda.take_error() == 0
    assert cuda.mode() == GLOBAL


def test_a_device_that_is_broken_refuses(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(cuda, "register", fail)
    cuda.install(monkeypatch)
    assert CudaPinner(GPU, None).pin(4096, 8192) == Refusal("CUDA error: an illegal memory access was encountered")
