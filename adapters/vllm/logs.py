"""Makes what this library logs show up among vLLM's own lines."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "KVSTORE_LOG_LEVEL"


def join_vllm() -> None:
    """Hand vLLM's handlers to the ``kvstore`` logger, unless it has some: then the application has decided.

    vLLM configures its own logger only, so without this nothing below WARNING would be seen. That one stays as is.
    """
    ours = logging.getLogger("kvstore")
    handlers = logging.getLogger("vllm").handlers
    if ours.handlers or not handlers:
        return
    for handler in handlers:
        ours.addHandler(handler)
    ours.propagate = False
    name = os.environ.get(LEVEL_VARIABLE, "").strip().upper() or "INFO"
    level = logging.getLevelNamesMapping().get(name)
    ours.setLevel(level or logging.INFO)
    if level is None:
        ours.warning("%s=%s is no level: using INFO", LEVEL_VARIABLE, name)
