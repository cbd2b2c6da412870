"""A prompt, and requests for it by tests of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore.index.plans import Place
from kvstore.model.keys import NO_EXTRAS
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
OTHER = [5, *PROMPT]
PLAIN = Setup()
Build = Callable[..., FakeVllm]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096] ^= 1
    path.write_bytes(content)


def in_memory(vllm: FakeVllm, prompt: list[int] = PROMPT) -> int:
    """Return the leading tokens of a prompt that are in memory."""
    return vllm.scheduler.find(prompt, NO_EXTRAS)[Place.MEMORY]


def again(vllm: FakeVllm, prompt: list[int] = PROMPT, *, salt: str = "") -> int:
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask("again", prompt, salt=salt)
    return vllm.loaded_tokens["again"]
