"""Tests of two real vLLMs and the proxy, for models with windows and states, and with two ranks on both sides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.disaggregated import PATIENT, Disaggregation, Work
from support.hybrid_engines import words
from support.hybrid_models import MAKERS
from support.vllm_engine import BLOCK_TOKENS, Completion, Engine, Prompt

from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

OUTPUT_TOKENS = 24
CHUNK_TOKENS = 64
SHARED = words(9, 640)
PROMPTS = [words(1, 20), words(2, 300), words(3, 981), [*SHARED, *words(4, 90)], [*SHARED, *words(5, 200)]]
LINES = f"""
enable_pd: true
pd_buffer_size: {256 << 20}
pd_timeout_ms: 600000
max_local_cpu_size: 0.25
load_only_if_faster: false
chunk_size: {CHUNK_TOKENS}
{PATIENT}"""
PLUGIN = """
[vllm.general_plugins]
end_steps_at_states = kvstore.tools.dev.mamba2:end_steps_at_states
"""


def pair(model: Path, folder: Path, arguments: Sequence[str] = ()) -> Disaggregation:
    """Return both engines and the proxy. A wait for the deadline of ten minutes would exceed a test's time limit."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    return Disaggregation(
        model,
        folder,
        prefill=LINES,
        decode=f"{LINES}pd_peer_init_port: {port}\n",
        arguments=arguments,
        options=["--decode-kv", f"kvs://127.0.0.1:{port}"],
    )


def assert_handed_over(running: Disaggregation, expected: Sequence[Completion], block_tokens: int) -> None:
    """Check that all answers are plain vLLM's, and that decode computes no more than the end of each prompt."""
    work = Work(running.decode)
    for prompt, plain in zip(PROMPTS, expected, strict=True):
        asked = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "return_token_ids": True}
        told: Prompt = running.ask("/v1/completions", asked)["choices"][0]["token_ids"]
        assert told[: plain.tie_at] == plain.token_ids[: plain.tie_at]
        assert work.of(prompt) <= len(prompt) - (len(prompt) - 1) // block_tokens * block_tokens
    assert read_counter(running.decode.url, "vllm:kvstore_handover_timeouts_total") == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "block_tokens"),
    [pytest.param("gemma3", 32, id="windows"), pytest.param("granite4", 64, id="states")],
)
def test_what_a_model_needs_besides_chunks_is_handed_over(
    name: str, block_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt's checkpoint is sent with its chunks."""
    let_plugins_end_steps(tmp_path / "plugin", monkeypatch)
    model = MAKERS[name](tmp_path / name)
    with Engine(model, enable_prefix_caching=False) as engine:
        expected = engine.generate(PROMPTS, max_tokens=OUTPUT_TOKENS, logprobs=2)
    with pair(model, tmp_path / "engines", ("--enable-prefix-caching",)) as running:
        assert_handed_over(running, expected, block_tokens)


def let_plugins_end_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix vLLM's Mamba2 on a CPU in all processes of engines, through an installed vLLM plugin."""
    from kvstore.tools.dev.mamba2 import end_steps_at_states

    end_steps_at_states()
    installed = folder / "ends_steps-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ends-steps\nVersion: 0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.soak
def test_two_ranks_on_both_sides(tiny_model: Path, tmp_path: Path) -> None:
    """Each rank sends its heads to the server of the same rank."""
    with Engine(tiny_model) as engine:
        expected = engine.generate(PROMPTS, max_tokens=OUTPUT_TOKENS, logprobs=2)
    running = pair(tiny_model, tmp_path / "engines", ("--tensor-parallel-size", "2"))
    for engine_process in (running.prefill, running.decode):
        engine_process.cores = "0|1"
    with running:
        assert_handed_over(running, expected, BLOCK_TOKENS)
