"""Prompts that leave memory before they are expected back, and the clock by which they are."""

from __future__ import annotations

from support.fake_parts import CHUNK
from support.fake_scheduler import FakeScheduler
from support.fake_vllm import FakeVllm


class Clock:
    """Seconds that have passed for the scheduler besides those of the tests."""

    ahead_s = 0.0


def crowd_out(vllm: FakeVllm, first: int = 100) -> None:
    """Ask for prompts that fill the memory, each twice, or the policy would refuse the later ones."""
    for number in range(first, first + 10):
        for turn in range(2):
            vllm.ask(f"other {number} {turn}", [number, *range(3 * CHUNK - 1)])
            vllm.settle()


def wait(vllm: FakeScheduler) -> None:
    """Let vLLM plan steps without requests as long as it is asked to."""
    vllm.step()
    vllm.run()
