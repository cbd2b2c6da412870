"""Options of ``kvstore simulate``, as its command line reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


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
    answers: Annotated[
        bool, typer.Option(help="Let policies learn from the lengths of answers, if the trace has them.")
    ] = True
    best: Annotated[
        bool, typer.Option(help="Also show the best possible hit rate, unless --block-tokens is given.")
    ] = True
