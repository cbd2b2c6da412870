"""Deviation between payloads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvstore.format.deviation import deviation, tolerance
from kvstore.model.chunks import ByteArray
from kvstore.model.layout import KVLayout

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
VALUES = 512


def layout_of(element: str) -> KVLayout:
    """Return a layout of two layers of one page."""
    size = DTYPES[element].itemsize if element in DTYPES else 1
    return KVLayout((VALUES * size,) * 2, 1, 4, 4, element=element)


def payload(values: torch.Tensor) -> ByteArray:
    found: ByteArray = values.view(torch.uint8).numpy()
    return found


def noise(element: str, seed: int) -> torch.Tensor:
    values = torch.randn(2 * VALUES, generator=torch.Generator().manual_seed(seed))
    return (values * 7).to(DTYPES[element])


@pytest.mark.parametrize("element", DTYPES)
def test_floats(element: str) -> None:
    layout, values = layout_of(element), noise(element, 1)
    assert deviation(payload(values), payload(values.clone()), layout, 1) == 0
    assert deviation(payload(values), payload(noise(element, 2)), layout, 1) > 0.5 > tolerance(layout)
    wrong = values.clone()
    wrong[VALUES + 3] += 2.0
    by_hand = abs(float(wrong[VALUES + 3]) - float(values[VALUES + 3])) / float(values[VALUES:].float().abs().max())
    assert deviation(payload(values), payload(wrong), layout, 1) == pytest.approx(by_hand)


@pytest.mark.parametrize("element", DTYPES)
def test_rounding_is_tolerated(element: str) -> None:
    layout, values = layout_of(element), noise(element, 1)
    nudged = (values.double() * (1 + torch.finfo(DTYPES[element]).eps)).to(DTYPES[element])
    assert 0 < deviation(payload(values), payload(nudged), layout, 1) <= tolerance(layout)


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_tolerated(element: str, value: float) -> None:
    values = noise(element, 1)
    wrong = values.clone()
    wrong[5] = value
    assert deviation(payload(values), payload(wrong), layout_of(element), 1) == math.inf
    assert deviation(payload(torch.zeros_like(values)), payload(values), layout_of(element), 1) == math.inf


@pytest.mark.parametrize("element", ["f8", "opaque"])
def test_other_bytes_are_counted(element: str) -> None:
    layout = layout_of(element)
    stored = np.zeros(2 * VALUES, np.uint8)
    fresh = stored.copy()
    fresh[: VALUES // 4] = 1
    assert deviation(fresh, stored, layout, 1) == 0.25 < tolerance(layout)
    assert deviation(stored + 1, stored, layout, 1) == 1.0 > tolerance(layout)
