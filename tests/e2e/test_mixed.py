"""Test of 150 mixed requests (300 in a soak) over few blocks, small tiers and reads that fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.churned import churn, distinct_prompts, plain_outputs
from support.vllm_engine import MODES

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


@pytest.mark.parametrize(
    ("mode", "requests"),
    [
        pytest.param({}, 150, id="as it is chosen"),
        pytest.param({}, 300, id="as it is chosen, more", marks=pytest.mark.soak),
        pytest.param(MODES["layer by layer"], 300, id="layer by layer", marks=pytest.mark.soak),
    ],
)
def test_requests_of_every_kind(tiny_model: Path, tmp_path: Path, mode: dict[str, Any], requests: int) -> None:
    rng = random.Random(6)
    distinct = distinct_prompts(rng)
    plain = plain_outputs(tiny_model, distinct)
    chosen = rng.choices(range(len(distinct)), k=requests)
    course = churn(tiny_model, tmp_path / "disk", mode, distinct, plain, chosen, rng)
    assert course.evicted >= requests // 3
    assert course.failed_loads >= requests // 10
