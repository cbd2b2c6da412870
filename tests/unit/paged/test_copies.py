"""Streamed copies of pages are those of numpy, byte for byte, and touch nothing else; numpy takes their place."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model import compiling
from kvstore.model.chunks import ByteArray
from kvstore.model.errors import InvalidCallError
from kvstore.paged import copies, streaming
from kvstore.paged.copies import HostCopies, NumpyCopies, Run, StreamedCopies, host_copies
from kvstore.paged.streaming import page_mover

IS_THERE = find_spec("llvmlite") is not None and platform.machine() == "x86_64"
needs_llvm = pytest.mark.skipif(not IS_THERE, reason="needs llvmlite, and a processor of x86-64")
GUARD = 0xA5


def run_of(planes: int, num_blocks: int, page_bytes: int, gap_bytes: int, offset: int, seed: int) -> Run:
    """Return planes of random bytes, each at an odd place in memory of its own."""
    rng = np.random.default_rng(seed)
    stride = page_bytes + gap_bytes
    rows = []
    for plane in range(planes):
        memory = rng.integers(0, 256, offset + plane + num_blocks * stride, np.uint8)
        rows.append(memory[offset + plane :].reshape(num_blocks, stride)[:, :page_bytes])
    return Run(rows, np.dtype(np.uint8), page_bytes, planes * page_bytes)


def move(way: HostCopies, block_ids: list[int], payload: ByteArray, run: Run, first: int, *, gathers: bool) -> None:
    ids = np.array(block_ids, np.int64)
    parts = payload.reshape(len(run.rows), -1, run.words)[:, first : first + len(ids)]
    for alone in (True, False):
        for page in way.pages(0, ids, parts, alone=alone):
            (way.gather if gathers else way.scatter)(page)


@needs_llvm
@given(data=st.data())
def test_streamed_copies_are_those_of_numpy(data: st.DataObject) -> None:
    page_bytes = data.draw(st.one_of(st.integers(1, 300), st.sampled_from([4096, 8192, 300_000])))
    planes, num_blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    gap, offset, shift = (data.draw(st.integers(0, 130)) for _ in range(3))
    block_ids = data.draw(st.lists(st.integers(0, num_blocks - 1), max_size=num_blocks, unique=True))
    first = data.draw(st.integers(0, 2))
    blocks, seed = first + len(block_ids) + data.draw(st.integers(0 if block_ids or first else 1, 2)), 7
    for gathers in (True, False):
        found = []
        for streams in (True, False):
            run = run_of(planes, num_blocks, page_bytes, gap, offset, seed)
            memory = np.full(shift + planes * blocks * page_bytes + 131, GUARD, np.uint8)
            payload = memory[shift : shift + planes * blocks * page_bytes]
            if not gathers:
                payload[:] = np.random.default_rng(seed + 1).integers(0, 256, len(payload), np.uint8)
            kernel = page_mover()
            assert kernel is not None
            way = StreamedCopies(kernel, [run], num_blocks) if streams else NumpyCopies([run])
            with mock.patch.object(copies, "COPY_BYTES", 2 * max(1, len(block_ids)) * page_bytes):
                move(way, block_ids, payload, run, first, gathers=gathers)
            found.append([memory, *(rows.base for rows in run.rows)])  # with all that lies around
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


def streamed(run: Run, num_blocks: int) -> HostCopies:
    way = host_copies([run], num_blocks)
    assert isinstance(way, StreamedCopies)
    return way


@needs_llvm
@pytest.mark.parametrize("bad", [9, -1, 1 << 62])
def test_an_id_that_changed_after_its_check_moves_no_foreign_memory(bad: int) -> None:
    run, payload = run_of(2, 9, 100, 0, 0, 1), np.full(600, GUARD, np.uint8)
    way, before = streamed(run, 9), [rows.copy() for rows in run.rows]
    ids = np.array([1, 2, 3], np.int64)
    pages = list(way.pages(0, ids, payload.reshape(2, 3, 100), alone=False))
    ids[1] = bad
    for copy in (way.gather, way.scatter):
        with pytest.raises(InvalidCallError, match="block ids changed"):
            copy(*pages)
    assert np.array_equal(payload[:100], before[0][1])
    assert (payload[100:] == GUARD).all()
    assert all(np.array_equal(rows, was) for rows, was in zip(run.rows, before, strict=True))


@needs_llvm
def test_memory_too_short_for_the_blocks_is_not_written() -> None:
    run = run_of(2, 9, 100, 0, 0, 1)
    way, ids = streamed(run, 9), np.arange(3)
    for shape in ((2, 2, 100), (1, 3, 100), (2, 3, 99), (2, 4, 100)):
        with pytest.raises(InvalidCallError, match="cannot be copied"):
            way.pages(0, ids, np.zeros(shape, np.uint8), alone=True)
    with pytest.raises(InvalidCallError, match="cannot be copied"):
        way.pages(0, ids, np.zeros((2, 3, 200), np.uint8)[:, :, ::2], alone=True)


@needs_llvm
def test_memory_that_is_read_only_is_not_written() -> None:
    run, payload = run_of(1, 9, 100, 0, 0, 1), np.zeros((1, 3, 100), np.uint8)
    payload.flags.writeable = False
    way = streamed(run, 9)
    (page,) = way.pages(0, np.arange(3), payload, alone=True)
    with pytest.raises(InvalidCallError, match="read-only"):
        way.gather(page)
    way.scatter(page)
    assert not run.rows[0][:3].any()


@needs_llvm
def test_ids_that_are_not_adjacent_live_as_long_as_their_pages() -> None:
    run, payload = run_of(3, 9, 64, 0, 0, 1), np.zeros((3, 3, 64), np.uint8)
    way = streamed(run, 9)
    pages = list(way.pages(0, np.array([4, 0, 8, 0, 2, 0])[::2], payload, alone=True))
    others = [np.full(3, 7) for _ in range(8)]  # take memory that was given back
    for page in pages:
        way.gather(page)
    assert all(np.array_equal(part, rows[[4, 8, 2]]) for part, rows in zip(payload, run.rows, strict=True))
    del others


@needs_llvm
def test_threads_stream_at_once() -> None:
    run = run_of(4, 64, 8192, 0, 0, 1)
    way, rng = streamed(run, 64), np.random.default_rng(2)

    def gather(_: int) -> bool:
        ids, payload = rng.permutation(64)[:16], np.zeros((4, 16, 8192), np.uint8)
        for page in way.pages(0, ids, payload, alone=False):
            way.gather(page)
        return all(np.array_equal(part, rows[ids]) for part, rows in zip(payload, run.rows, strict=True))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(gather, range(100)))


@needs_llvm
def test_streaming_stores_come_before_a_fence_and_the_fence_before_the_return() -> None:
    """Without it other threads could be told of a copy before they see its bytes, which no test would notice."""
    llvm = pytest.importorskip("llvmlite.binding")
    assert page_mover() is not None  # prepares LLVM
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3)
    code = machine.emit_assembly(llvm.parse_assembly(streaming._TEXT))
    assert "\tmovnt" in code
    caller = code[code.index("\nmove_pages:") :]
    assert caller.count("\tsfence") == caller.count("\tret") == 1
    assert caller.index("copy_page") < caller.index("\tsfence") < caller.index("\tret")
    assert "\tcall" not in caller[caller.index("\tsfence") :]


# Without LLVM


def forbidden(*_: object, **__: object) -> None:
    raise PermissionError("no code is made here")


def refused(_: str) -> None:
    raise RuntimeError("LLVM is of another version")


NO_CODE = SimpleNamespace(mmap=forbidden, PAGESIZE=1, PROT_READ=1, PROT_WRITE=2, PROT_EXEC=4)


@pytest.mark.parametrize(
    ("module", "name", "replacement", "level", "message"),
    [
        ("", "llvmlite", None, logging.INFO, "pip install"),
        ("llvmlite.binding", "parse_assembly", refused, logging.WARNING, "another version"),
        ("kvstore.model.compiling", "mmap", NO_CODE, logging.WARNING, "no code"),
    ],
    ids=["missing", "fails", "forbidden"],
)
@pytest.mark.skipif(not IS_THERE, reason="needs llvmlite, to take it away")
def test_numpy_copies_where_llvm_does_not_work(
    module: str,
    name: str,
    replacement: object,
    level: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(vars(import_module(module)) if module else sys.modules, name, replacement)
    compiling.assembled.cache_clear()
    run = run_of(1, 9, 100, 0, 0, 1)
    try:
        with caplog.at_level(logging.INFO):
            assert isinstance(host_copies([run], 9), NumpyCopies)
            assert isinstance(host_copies([run], 9), NumpyCopies)
    finally:
        compiling.assembled.cache_clear()
    (record,) = caplog.records
    assert record.levelno == level
    assert message in record.getMessage()


def test_other_processors_copy_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert isinstance(host_copies([run_of(1, 9, 100, 0, 0, 1)], 9), NumpyCopies)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import ctypes; assert not ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)"])
def test_a_process_survives_whether_or_not_it_may_make_code(before: str) -> None:
    """With systemd's ``MemoryDenyWriteExecute``, which is the call of ``prctl``, LLVM's code would crash."""
    code = f"{before}\nfrom kvstore.paged.streaming import page_mover\nprint(page_mover() is None)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "AssertionError" in ran.stderr:
        pytest.skip("the kernel cannot forbid it")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(bool(before) or not IS_THERE)


@pytest.mark.slow
@needs_llvm
def test_vllm_can_start_afterwards() -> None:
    pytest.importorskip("vllm.triton_utils.dispatcher")
    code = (
        "from kvstore.paged.streaming import page_mover; assert page_mover();"
        "from vllm.triton_utils.dispatcher import _rebind_kernels; _rebind_kernels([])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
