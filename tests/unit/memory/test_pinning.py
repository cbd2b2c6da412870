"""Pinning during a capture of CUDA graphs, on a fake CUDA."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.fake_cuda import GLOBAL, OUT_OF_MEMORY, UNSUPPORTED, FakeCuda

from kvstore.memory.pinning import CudaPinner, Refusal, find_pinner, find_runtime

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


def test_where_a_gpu_is_plugged_in(cuda: FakeCuda) -> None:
    runtime = cuda.runtime()
    assert [runtime.pci_address(index) for index in range(3)] == ["0000:3a:00.0", "0000:3b:00.0", None]
    assert cuda.take_error() == 0


def test_the_runtime_is_found_among_what_is_mapped_or_not(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert find_runtime(maps, "13.0") is None  # the file cannot be read
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42 /usr/lib/libcudart.so.12\n7f02-7f03 rw-p 0 00:00 0\n")
    assert find_runtime(maps, "13.0") is None  # another version
    assert find_runtime(maps, None) is None  # torch without CUDA
    library = tmp_path / "libcudart.so.13.0.96"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 42 {library}\n")
    assert find_runtime(maps, "13.0") is None  # is not there
    system = next(path for path in Path("/proc/self/maps").read_text().split() if path.endswith("/libc.so.6"))
    shutil.copy(system, library)
    assert find_runtime(maps, "13.0") is None  # has none of the calls
