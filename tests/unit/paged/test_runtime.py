"""Calls of the CUDA runtime, on a fake one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.fake_cuda import OUT_OF_MEMORY, FakeCuda

from kvstore.paged.runtime import find_runtime


def test_where_a_gpu_is_plugged_in() -> None:
    cuda = FakeCuda()
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


@pytest.mark.parametrize(
    ("major", "index", "uses_host_pointers", "takes"),
    [
        (13, 0, True, True),
        (13, 1, True, True),
        (13, 0, False, False),
        (13, 2, True, False),  # there is no such device
        (12, 0, True, False),
        (14, 0, True, False),
    ],
)
def test_where_batches_are_taken(major: int, index: int, uses_host_pointers: bool, takes: bool) -> None:
    """That is in CUDA 13, where the device uses the host's pointers."""
    cuda = FakeCuda()
    cuda.uses_host_pointers = uses_host_pointers
    assert cuda.runtime(major).takes_batches(index) is takes
    assert cuda.take_error() == 0


@pytest.mark.parametrize("error", [0, OUT_OF_MEMORY])
def test_copies_of_a_batch(error: int) -> None:
    """Each goes from its source to its target, byte for byte. One that fails leaves no error for torch to raise."""
    cuda = FakeCuda()
    cuda.batch_error, cuda.stream = error, 5
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    table = np.array(
        [
            [target.ctypes.data, target.ctypes.data + 50],
            [source.ctypes.data + 7, source.ctypes.data + 20],
            [3, 10],
        ],
        np.uint64,
    )
    assert cuda.runtime().copy_all(table, 5) == error
    wanted = np.zeros(64, np.uint8)
    wanted[:3] = source[7:10]
    if not error:
        wanted[50:60] = source[20:30]
    assert target.tolist() == wanted.tolist()
    assert cuda.take_error() == 0
    assert (cuda.batches, cuda.wrong) == ([2], [])
