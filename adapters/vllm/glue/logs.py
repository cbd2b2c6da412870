"""Prints this library's log records among vLLM's own, with a mark on each line."""

from __future__ import annotations

import copy
import logging
import os
from typing import Final

LEVEL_VARIABLE: Final = "KVSTORE_LOG_LEVEL"
MARK: Final = "kvstore: "

_THEIRS: Final = logging.getLogger("vllm")


def join_vllm() -> None:
    """Make vLLM's handlers print the records of the ``kvstore`` logger, unless that logger has handlers.

    vLLM configures only its own logger, so nothing below WARNING would be printed without this.
    """
    ours = logging.getLogger("kvstore")
    if ours.handlers or not _THEIRS.handlers:
        return
    name = os.environ.get(LEVEL_VARIABLE, "").strip().upper()
    level = logging.getLevelNamesMapping().get(name or "INFO")
    ours.addHandler(_AmongTheirs(passes_levels=bool(name) and level is not None))
    ours.propagate = False
    ours.setLevel(level or logging.INFO)
    if level is None:
        ours.warning("%s=%s is not a log level: using INFO", LEVEL_VARIABLE, name)


class _AmongTheirs(logging.Handler):
    """Handler that passes records to vLLM's handlers, with our mark before each line of the message.

    Args:
        passes_levels: also print records below the handlers' levels, which are meant for vLLM's records.
    """

    def __init__(self, *, passes_levels: bool) -> None:
        super().__init__()
        self._passes_levels = passes_levels

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a marked copy of a record to vLLM's handlers."""
        ours = copy.copy(record)
        ours.msg, ours.args = _Marked(record), None
        for handler in _THEIRS.handlers:
            if self._passes_levels or record.levelno >= handler.level:
                handler.handle(ours)


class _Marked:
    """A record's message, formatted when a handler asks for it, so that the handler catches errors of the format."""

    def __init__(self, record: logging.LogRecord) -> None:
        self._record = record

    def __str__(self) -> str:
        return MARK + self._record.getMessage().replace("\n", f"\n{MARK}")
