"""The ways to move KV under vLLM, as keys of the store."""

from __future__ import annotations

from typing import Any

import pytest

MODES: dict[str, dict[str, Any]] = {
    "within a step": {"kvstore.enable_async_loading": False, "kvstore.enable_async_saving": False},
    "layer by layer": {"kvstore.enable_async_loading": False, "kvstore.use_layerwise": True},
    "beside": {"kvstore.enable_async_loading": True, "kvstore.enable_async_saving": True},
}

# Where every mode takes long, continuous integration tries only the one that differs most, and a soak the others.
ONE_MODE_AND_SOAK = pytest.mark.parametrize(
    "mode",
    [pytest.param(keys, id=name, marks=() if name == "beside" else pytest.mark.soak) for name, keys in MODES.items()],
)
