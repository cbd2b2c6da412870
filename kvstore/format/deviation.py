"""The deviation between two payloads of one chunk: as stored, and as computed again.

KV computed again is not equal, as the order of sums changes with the batch. For float elements the deviation is the
largest difference divided by the layer's largest value, so it means the same for all models; another prompt's KV
deviates by about 1. For other elements, such as packed or 8-bit ones, it is the fraction of bytes that differ.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.model.chunks import ByteArray
from kvstore.model.layout import KVLayout

_TOLERANCES: Final = {"f32": 1e-3, "f16": 0.02, "bf16": 0.1}
_OPAQUE_TOLERANCE: Final = 0.5


def tolerance(layout: KVLayout) -> float:
    """Return the deviation up to which payloads count as equal."""
    return _TOLERANCES.get(layout.element, _OPAQUE_TOLERANCE)


def deviation(fresh: ByteArray, stored: ByteArray, layout: KVLayout, num_blocks: int) -> float:
    """Return the largest deviation over a chunk's layers; infinite if a value is not finite."""
    worst = 0.0
    for begin, end in layout.layer_ranges(num_blocks):
        one, other = fresh[begin:end], stored[begin:end]
        if not np.array_equal(one, other):
            worst = max(worst, _between(one, other, layout.element))
    return worst


def _between(fresh: ByteArray, stored: ByteArray, element: str) -> float:
    if element not in _TOLERANCES:
        return float(np.count_nonzero(fresh != stored)) / len(fresh)
    one, other = _floats(fresh, element), _floats(stored, element)
    scale, difference = float(np.abs(one).max()), float(np.abs(one - other).max())
    return difference / scale if math.isfinite(difference) and scale else math.inf


def _floats(payload: ByteArray, element: str) -> npt.NDArray[Any]:
    if element == "bf16":
        return (payload.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return payload.view(np.float16).astype(np.float32) if element == "f16" else payload.view(np.float32)
