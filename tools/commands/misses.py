"""Command ``kvstore why``, which explains from a recorded trace why a request missed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools.console import Answer


def why(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A request's id or a part of it, and a trace.", metavar="[REQUEST] [TRACE]", show_default=False
        ),
    ] = None,
    *,
    last: Annotated[
        int, typer.Option(min=1, help="Without REQUEST: list so many of the latest requests that missed.")
    ] = 20,
    config: Annotated[
        Path | None,
        typer.Option(help="Configuration whose record_trace is the trace; else that in effect.", exists=True),
    ] = None,
) -> Answer:
    """Explain a miss from a recorded trace: the eviction, refusal or failed store behind it, and what to do.

    REQUEST is vLLM's id, or a part of it that no other id has, such as the client's X-Request-Id. Without REQUEST,
    lists the latest requests that missed. Without TRACE, reads the latest one of the configuration (record_trace).

    Exits with 2 if the trace cannot be used, or has no such request.
    """
    from kvstore.tools.why.run import answer  # noqa: PLC0415

    return answer(words or (), config, last)
