"""Triton's kernels without a GPU, compared with PyTorch's indexing, and through the compiler."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstore.paged.kernels import TorchKernels, kernels_for
from kvstore.paged.streams import Streams

ROOT = Path(__file__).resolve().parents[3]


def triton_folder() -> Path | None:
    """Return Triton's folder, which is outside the environment so that vLLM's CPU build ignores it. None if inside."""
    if importlib.util.find_spec("triton") is not None:
        return None
    for folder in (Path(os.environ.get("TRITON_FOLDER", "")), Path(sys.prefix, "triton")):
        if folder.is_absolute() and (folder / "triton").is_dir():
            return folder
    pytest.skip("Triton is not installed: tools/dev/venv.sh puts it into a folder of its own")


def trials(cache: Path, *how: str) -> str:
    folder = triton_folder()
    paths = [ROOT, ROOT / "tests", *([folder] if folder else [])]
    ended = subprocess.run(
        [sys.executable, "-m", "support.kernel_trials", *how],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRITON_CACHE_DIR": str(cache),
            "TRITON_INTERPRET": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_kernels_compile_and_move_what_pytorch_moves(tmp_path: Path) -> None:
    """All trials share one process, because importing PyTorch and Triton takes as long as many of them."""
    said = trials(tmp_path)
    assert said.count("compiled") == 6
    assert said.count("same bytes") > 20


@pytest.mark.soak
def test_the_kernels_move_elements_of_every_width(tmp_path: Path) -> None:
    assert trials(tmp_path, "all").count("same bytes") > 35


def test_pytorch_moves_blocks_on_a_cpu() -> None:
    streams = Streams(torch.device("cpu"))
    assert isinstance(kernels_for([torch.zeros(2, 2)], streams, streams.allocate(16)), TorchKernels)
