"""Test of a rolling upgrade on real vLLM: engines of two versions take turns on a disk folder, a Redis, a server.

``make matrix`` runs it in the newer version's environment and names the older one's interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cache_server import ServerProcess, short_folder
from support.redis_server import RedisServer, running
from support.runner import run_elsewhere
from support.vllm_engine import CHUNK_TOKENS, Completion, Prompt, StoreSetup, assert_same_outputs, through_memory

OTHER = os.environ.get("OTHER_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.skipif(not OTHER, reason="needs OTHER_VLLM_PYTHON, an interpreter with another vLLM: make matrix"),
]


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreSetup]:
    """Yield the setup of the tier where both keep KV, so that none of it is only in an engine's memory."""
    match request.param:
        case "disk":
            yield StoreSetup(tmp_path / "disk")
        case "redis":
            with running(server := RedisServer(tmp_path / "redis")):
                yield through_memory(f"redis://127.0.0.1:{server.port}")
        case _:
            with short_folder() as folder:
                process = ServerProcess(folder).start()
                yield through_memory(process.url)
                process.kill()


@pytest.mark.parametrize("shared", ["disk", "redis", "server"], indirect=True)
def test_what_one_version_stores_the_other_loads(
    tiny_model: Path, prompts: list[Prompt], plain_outputs: list[Completion], shared: StoreSetup
) -> None:
    """Each version computes half of the prompts, and loads the other half."""
    halves = [prompts[0::2], prompts[1::2]]
    expected = [plain_outputs[0::2], plain_outputs[1::2]]
    store = vars(shared) | {"disk": str(shared.disk) if shared.disk else None}

    def generate(python: str, asked: list[Prompt]) -> list[Completion]:
        engine = {"store": store, "rounds": ["once"], "prompts": asked}
        job = {"model": str(tiny_model), "two_processes": True, "max_tokens": 12, "engines": [engine]}
        return run_elsewhere(job, python=python)[0][0]

    for python, half in ((OTHER, 0), (sys.executable, 1)):
        assert_same_outputs(expected[half], generate(python, halves[half]))
    for python, half in ((sys.executable, 0), (OTHER, 1)):
        found = generate(python, halves[half])
        assert_same_outputs(expected[half], found)
        for prompt, completion in zip(halves[half], found, strict=True):
            whole_chunks = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS  # a tail is dropped for its whole chunk
            assert completion.cached_tokens >= whole_chunks
