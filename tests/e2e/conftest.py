"""Fixtures of the tests on real vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from support.cache_server import ServerProcess, serving_process
from support.forked import VLLM, forker
from support.vllm_engine import MODES, Completion, Engine, Prompt, make_prompts, prepare_environment

from kvstore.tools.vllmserver import VllmProcess


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    prepare_environment(two_processes=False)


@pytest.fixture(scope="session", autouse=True)
def _servers_fork() -> Iterator[None]:
    """Let each ``vllm serve`` be a fork of one process that has imported vLLM."""

    def launch(_: VllmProcess, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Any:
        return forker(VLLM).launch(command, environment, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmProcess, "_launch", launch)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Llama whose greedy outputs depend on every token of the prompt."""
    from kvstore.tools.models import TINY, build_llama

    return build_llama(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Return the prompts of ``make_prompts``."""
    return make_prompts()


@pytest.fixture(scope="session")
def plain_outputs(tiny_model: Path, prompts: Sequence[Prompt]) -> list[Completion]:
    """Return the answers of plain vLLM, in float32."""
    with Engine(tiny_model) as engine:
        return engine.generate(prompts, logprobs=2)


@pytest.fixture(params=[pytest.param(m, marks=pytest.mark.sweep if m == "within a step" else ()) for m in MODES])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the store's keys for each way to move KV, in turn."""
    return MODES[request.param]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """Yield a cache server with a disk."""
    with serving_process(disk_gib=1) as server:
        yield server
