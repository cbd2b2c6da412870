"""Command ``kvstore simulate``, which replays recorded traces through eviction policies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools.console import AsJson


@dataclass(frozen=True)
class Simulation:
    """Options of a simulation."""

    chunks: Annotated[str, typer.Option(help="Memory sizes in chunks, such as 1000,5000.")] = ""
    size: Annotated[str, typer.Option(help="Memory sizes in GiB, such as 20,40; needs --bytes-per-token.")] = ""
    disk: Annotated[float | None, typer.Option(help="Size of a disk below the memory, in the same unit.")] = None
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="Bytes of KV per token, such as 131072 for Llama-3.1-8B.")
    ] = None
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that an id of the traces stands for, several to a chunk: shows what hits that end with any "
            "block bring, beside whole chunks and tails.",
        ),
    ] = None
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a chunk, with --block-tokens; by default 256.")
    ] = None
    policy: Annotated[list[str] | None, typer.Option(help="Policy to replay; repeatable. By default all.")] = None
    best: Annotated[
        bool, typer.Option(help="Also show the best possible hit rate, unless --block-tokens is given.")
    ] = True


def simulate(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces that kvstore recorded, or in Mooncake's format.", exists=True)
    ],
    *,
    given: Simulation,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this .svg, .png or .pdf file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traces through the eviction policies: what would another 100 GB bring?

    For a trace of Mooncake, whose ids stand for 512 tokens: --block-tokens 512 --chunk-tokens 4096.

    Sizes are in chunks unless --bytes-per-token is given. Exits with 2 if a trace cannot be read.
    """
    from kvstore.tools.simulate.run import SimulateOptions, simulate_and_print  # noqa: PLC0415

    simulate_and_print(traces, SimulateOptions(given), plot_file=plot, as_json=as_json)
