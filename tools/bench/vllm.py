"""Bench lines of real vLLM on the CPU, with a random model, in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.samples import Pair, Tick, require
from kvstore.tools.bench.servers import private_server
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.models import DEMO, build_llama, count_words

_MODULE: Final = "kvstore.adapters.vllm.offline.measuring"
_HANDOVER_MODULE: Final = "kvstore.adapters.vllm.offline.measuring_handover"
_RECEIVER_BYTES: Final = 512 << 20
_MARK: Final = "BENCH SAMPLES "
_TIMEOUT_S: Final = 1800.0
VOCABULARY: Final = count_words(DEMO.vocab)
_SETTINGS: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


# The limits, in order: a hit in vLLM's prefix cache; 1.3 times that, plus a block computed; 1.2 hits in memory; a
# hundredth of the steps' time; vLLM without the connector; the same; its start, plus a second; a fifth of the time of a
# prefill.
SUBJECTS: Final = {
    "one_token_left": Subject(
        "vLLM: hit in memory, one token left", "vLLM's prefix cache", "a prompt of 2,049 tokens, to its first token"
    ),
    "any_length": Subject(
        "vLLM: hit in memory, any length", "1.3 of it, a block", "four lengths, each ending inside of a block"
    ),
    "prefetched": Subject(
        "vLLM: next turn, prefetched from disk", "1.2 of memory", "a prompt of 1,024 tokens, crowded out of memory"
    ),
    "hooks": Subject("vLLM: all hooks, no hit", "1% of the steps", "every hook of the connector, stores included"),
    "throughput": Subject("vLLM: throughput, no hit", "no connector", "a batch of new prompts"),
    "control": Subject("vLLM: no connector, again", "no connector", "a batch of new prompts, in another such vLLM"),
    "start": Subject(
        "vLLM: start, pool of 4 GiB", "no connector, and 1 s", "from the call until it takes requests, imports aside"
    ),
    "handover": Subject(
        "vLLM: hand-over behind a prefill", "a fifth of the prefill", "until another process has its KV"
    ),
}


def measure_vllm(_: Workbench, rounds: int, tick: Tick, folder: Path) -> list[Line]:
    """Run vLLM with a random model in ``folder``, and return the lines."""
    tick()
    require_vllm()
    model = build_llama(folder / "model", DEMO)
    samples = _run(_MODULE, model, rounds)
    with private_server(folder, _RECEIVER_BYTES) as (_ipc, url):
        samples |= _run(_HANDOVER_MODULE, model, rounds, url)
    return [subject.line([Pair(*pair) for pair in samples[name]]) for name, subject in SUBJECTS.items()]


def require_vllm() -> None:
    """Check for vLLM before a model is built.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if not has_vllm():
        raise ConfigError("it is not installed: run make bench, which installs it")


def has_vllm() -> bool:
    """Tell if vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def environment() -> dict[str, str]:
    """Return the environment of a vLLM process, with a small KV cache, few log messages, and no network."""
    return {**os.environ, **_SETTINGS}


def _run(module: str, model: Path, rounds: int, *more: str) -> dict[str, list[tuple[float, float]]]:
    """Run a measuring module, and return the samples of each of its lines."""
    done = subprocess.run(  # noqa: S603 - our own module, in this interpreter
        [sys.executable, "-m", module, str(model), str(VOCABULARY), str(rounds), *more],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=environment(),
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    require(bool(lines), f"vLLM ended with status {done.returncode}: {done.stderr[-2000:]}")
    samples: dict[str, list[tuple[float, float]]] = json.loads(lines[0][len(_MARK) :])
    return samples
