"""A machine that has no further thread for some of those who start one."""

from __future__ import annotations

import threading

import pytest


def refuse_threads(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let no thread start from now on whose name begins like this."""
    start = threading.Thread.start

    def start_if_allowed(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", start_if_allowed)
