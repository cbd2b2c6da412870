"""Requests to real vLLM that come, go and are aborted, over few blocks, small tiers and reads that fail."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support.churned import churn, distinct_prompts, plain_outputs
from support.vllm_engine import MODES, prepare_environment

from kvstore.tools.models import TINY, build_llama
from soak.part import Batch, Do, Part

REQUESTS: Final = 300  # of a batch
_LEAST: Final = REQUESTS // 20  # chunks evicted, and failed loads, of a batch
_PROMPTS_SEED: Final = 43
_MODES: Final = ({}, *MODES.values())  # by turns


@contextmanager
def opened(folder: Path) -> Iterator[Do]:
    """Yield batches of requests, each to a new engine; plain vLLM has answered all prompts once."""
    prepare_environment(two_processes=False)
    model = build_llama(folder / "model", TINY)
    distinct = distinct_prompts(random.Random(_PROMPTS_SEED))
    plain = plain_outputs(model, distinct)

    def send(seed: int) -> Batch:
        dice = random.Random(seed)
        chosen = dice.choices(range(len(distinct)), k=REQUESTS)
        disk = folder / "disk"
        try:
            course = churn(model, disk, _MODES[seed % len(_MODES)], distinct, plain, chosen, dice)
        finally:
            shutil.rmtree(disk, ignore_errors=True)
        assert min(course.evicted, course.failed_loads) >= _LEAST, f"too few for a test: {course}"
        notes = {"equal": course.equal, "aborted": course.aborted}
        return Batch(REQUESTS, notes=notes | {"evicted": course.evicted, "failed loads": course.failed_loads})

    yield send


PART = Part("churn", "requests to vLLM", 10_000, opened)
