"""The process around a cache server."""

from __future__ import annotations

import gc
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import StoreConfig
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.hub import Hub
from kvstore.server.options import ServerOptions
from kvstore.tools.serve import process
from kvstore.tools.serve.reloading import Reloader


def test_python_does_not_look_for_cycles_among_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection would take 200 ms at a time, on the thread that decides."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    options = ServerOptions(16 * PAGE_BYTES, folder=tmp_path / "run")
    hub = Hub(options)
    monkeypatch.setattr(process, "Hub", lambda _: hub)
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        seen.append(info["generation"] if phase == "stop" else -1)

    def grow(_state: dict[str, object]) -> None:
        gc.callbacks.append(note)
        kept = [[number] for number in range(200_000)]
        gc.callbacks.remove(note)
        assert kept
        hub.stop()

    reloader = Reloader(tmp_path / "unread.yaml", StoreConfig())
    assert process.run_server(options, reloader, None, grow, process.Successions())
    assert gc.get_threshold() == (700, 10, 10)
    gc.set_threshold(*thresholds)
    assert 1 in seen
    assert 2 not in seen


def test_a_server_that_is_told_to_end_while_it_opens_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container ignores signals that it does not handle."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    numbers = (signal.SIGHUP, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]

    def open_hub(_: ServerOptions) -> Hub:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(process, "Hub", open_hub)
    reloader = Reloader(tmp_path / "unread.yaml", StoreConfig())
    with pytest.raises(SystemExit) as ended:
        process.run_server(ServerOptions(PAGE_BYTES), reloader, None, lambda _: None, process.Successions())
    assert ended.value.code == 128 + signal.SIGTERM
    reloader.close()
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
