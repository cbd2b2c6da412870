"""The vLLM lines of the bench: real vLLM on the CPU, with a model that is made up, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.tools.bench_work import BenchError, Pair
from kvstore.tools.models import DEMO, build_llama

_MODULE: Final = "kvstore.adapters.vllm.measuring"
_MARK: Final = "BENCH SAMPLES "
_NO_WORDS: Final = 8  # at the end of the made-up vocabulary
_TIMEOUT_S: Final = 1800.0


def measure_vllm(folder: Path, rounds: int) -> dict[str, list[Pair]]:
    """Run vLLM with a model in ``folder``. Returns the samples of each line, under the names in ``_MODULE``.

    Raises:
        ConfigError: vLLM is not installed.
        BenchError: the run failed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed: run make bench, which installs it")
    model = build_llama(folder / "model", DEMO)
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(  # noqa: S603 - our own module, in this interpreter
        [sys.executable, "-m", _MODULE, str(model), str(DEMO.vocab - _NO_WORDS), str(rounds)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise BenchError(f"vLLM ended with status {done.returncode}: {done.stderr[-2000:]}")
    samples = json.loads(lines[0][len(_MARK) :])
    return {name: [Pair(*pair) for pair in pairs] for name, pairs in samples.items()}
