"""Steps of the demonstration, without output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvstore.tools.demo.server import VllmServer
from kvstore.tools.models import DEMO, as_text, build_llama, random_tokens
from kvstore.tools.processes import handled
from kvstore.tools.vllmclient import TOKENS_LOADED, Completion, complete, read_counter
from kvstore.tools.vllmserver import ServerFailedError, find_vllm

CHUNK_TOKENS = 256
PROMPT_TOKENS = 3000
WARMUP_TOKENS = 24  # with its output less than one block, so nothing is stored
OUTPUT_TOKENS = 16
STAGES = 7

_CONFIG = """\
# Written by `kvstore demo`. Sizes are in GiB.
chunk_size: {chunk_size}
local_cpu: true
max_local_cpu_size: 1
local_disk: {local_disk}
max_local_disk_size: 4
"""


@dataclass(frozen=True)
class DemoResult:
    """Measurements of the demonstration."""

    prompt_tokens: int
    output_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    loaded_tokens: int
    disk_bytes: int
    outputs_identical: bool

    @property
    def ratio(self) -> float:
        """Warm time to the first token, as a fraction of the cold one."""
        return self.warm_ttft_s / self.cold_ttft_s

    @property
    def expected_tokens(self) -> int:
        """Minimum loaded tokens of a success: every whole chunk before the last token, which is always computed."""
        return (self.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS

    def problems(self) -> list[str]:
        """Return the reasons why the demonstration failed; empty if it succeeded."""
        found = []
        if not self.outputs_identical:
            found.append("the outputs before and after the restart differ")
        if self.loaded_tokens == 0:
            found.append("nothing was loaded: the restarted vLLM computed the whole prompt")
        elif self.loaded_tokens < self.expected_tokens:
            found.append(f"only {self.loaded_tokens} of the {self.expected_tokens} tokens in whole chunks were loaded")
        return found


def run_demo(folder: Path, *, prompt_tokens: int = PROMPT_TOKENS, report: Callable[[str], None]) -> DemoResult:
    """Run vLLM twice over one disk folder and compare.

    Args:
        folder: working folder; it keeps the model between runs, but not the cache.
        prompt_tokens: length of the prompt.
        report: called with the text of each of the ``STAGES`` stages when it begins.

    Raises:
        ServerFailedError: a server did not start, answer or stop.
    """
    find_vllm()
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    if cache.exists():
        shutil.rmtree(cache)  # otherwise the cold run would find chunks
    cache.mkdir()
    report("building a random Llama, 520 MB" if not (folder / "model").exists() else "looking at the model")
    model = build_llama(folder / "model", DEMO)
    config = folder / "kvstore.yaml"
    config.write_text(_CONFIG.format(chunk_size=CHUNK_TOKENS, local_disk=json.dumps(str(cache))), encoding="utf-8")
    prompt = as_text(random_tokens(prompt_tokens, vocab=DEMO.vocab, seed=1))

    # SystemExit unwinds the stack, so that the servers end with this process.
    with handled((signal.SIGTERM, signal.SIGHUP), lambda caught, _frame: sys.exit(128 + caught)):
        report("starting vLLM with an empty cache")
        cold, _ = _ask(VllmServer(model, config, folder / "cold.log"), prompt, "computing the prompt", report)
        report("dropping the page cache")
        drop_page_cache(cache)
        report("starting vLLM again, in a new process")
        warm, loaded = _ask(
            VllmServer(model, config, folder / "warm.log", drains=False), prompt, "loading the prompt", report
        )
    return DemoResult(
        prompt_tokens=prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        cold_ttft_s=cold.ttft_s,
        warm_ttft_s=warm.ttft_s,
        loaded_tokens=loaded,
        disk_bytes=sum(file.stat().st_size for file in _files(cache)),
        outputs_identical=cold.text == warm.text,
    )


def drop_page_cache(folder: Path) -> None:
    """Drop the cached pages of every file below ``folder``, so that the next read reaches the device, without root."""
    for file in _files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only written pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _ask(server: VllmServer, prompt: str, stage: str, report: Callable[[str], None]) -> tuple[Completion, int]:
    """Start a server, send it ``prompt``, and stop it; return the answer, and the tokens that the server loaded."""
    warmup = as_text(random_tokens(WARMUP_TOKENS, vocab=DEMO.vocab, seed=0))
    with server:
        try:
            complete(server.url, str(server.model), warmup, output_tokens=4)
            loaded_before = read_counter(server.url, TOKENS_LOADED)
            report(stage)
            answer = complete(server.url, str(server.model), prompt, output_tokens=OUTPUT_TOKENS)
            loaded = read_counter(server.url, TOKENS_LOADED) - loaded_before
        except httpx.HTTPError as error:
            raise ServerFailedError(f"vLLM did not answer a request: {error!r}", server.log) from error
    return answer, loaded


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
