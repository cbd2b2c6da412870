"""What is said of the memory of a device."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.assembly import log_device_bytes
from kvstore.layout import KVLayout
from kvstore.options import EngineOptions

LAYOUT = KVLayout((65_536,) * 32, 1, 16, 256)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (torch.device("cuda", 1), ["256.0 MiB of cuda:1 are taken: staging 192.0 MiB", "GPU tier 64.0 MiB"]),
        (torch.device("cpu"), []),
    ],
)
def test_the_start_tells_what_it_takes_of_a_gpu(
    device: torch.device, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    paged: Any = SimpleNamespace(device=device, layout=LAYOUT)
    with caplog.at_level(logging.INFO, "kvstore"):
        log_device_bytes(paged, EngineOptions(1 << 30, max_local_gpu_bytes=70 << 20), threads=3)
    assert len(caplog.records) == bool(said)
    assert all(part in caplog.text for part in said)
