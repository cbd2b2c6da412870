"""Fixtures of the bench's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.forked import forker

from kvstore.tools.bench import servers
from kvstore.tools.processes import running


@pytest.fixture(autouse=True)
def _children_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bench's modules and servers be forks of a process that has imported torch."""

    @contextmanager
    def forking(command: Sequence[Any], **options: Any) -> Iterator[Any]:
        if command[0] != sys.executable or command[2].endswith(".bare_http"):  # which has no ``main``
            with running(command, **options) as process:
                yield process
            return
        with forker().start(command[2:], text=True, **options) as process:
            try:
                yield process
            finally:
                process.kill()

    monkeypatch.setattr(servers, "running", forking)
