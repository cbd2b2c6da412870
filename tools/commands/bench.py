"""``kvstore bench``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import KVStoreError
from kvstore.tools.console import FAILED, AsJson, give_up

BENCH_FOLDER = Path("/var/tmp")  # noqa: S108 - on a disk where /tmp may be memory; the folder made in it is private


def bench(
    *,
    geometry: Annotated[
        str,
        typer.Option(
            help="Whose KV: llama-8b, llama-70b-tp8, qwen-0.5b, deepseek-mla, or layers=28,kv_heads=4,head_size=128."
        ),
    ] = "llama-8b",
    batch_mib: Annotated[int, typer.Option(help="Moved by one call; about eight times as much memory is used.")] = 256,
    rounds: Annotated[int, typer.Option(min=7, help="Samples of each line.")] = 15,
    folder: Annotated[Path, typer.Option(help="The disk to measure.", exists=True, file_okay=False)] = BENCH_FOLDER,
    disk: Annotated[bool, typer.Option(help="Measure the disk too.")] = True,
    start: Annotated[bool, typer.Option(help="Measure importing the library and opening an engine too.")] = True,
    redis: Annotated[bool, typer.Option(help="Measure Redis too, if redis-server is on the PATH.")] = True,
    server: Annotated[bool, typer.Option(help="Measure the cache server too.")] = True,
    gpu: Annotated[bool, typer.Option(help="Measure a GPU too, if there is one.")] = True,
    vllm: Annotated[bool, typer.Option(help="Measure real vLLM too, if it is installed; takes minutes.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw bars against the limit: .svg, .png or .pdf.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Show beside it an older run, from --json.")] = None,
    turns: Annotated[
        str | None,
        typer.Option(help="Conversations over real vLLM instead: all, or example,memory,disk,redis,server."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every path against the limit of this machine, in one run.

    Exits with 1 if a fraction is below its recorded floor, or a path lost a byte.
    """
    from kvstore.tools.bench.command import converse_and_print, measure_and_print  # noqa: PLC0415
    from kvstore.tools.bench.geometry import parse_geometry  # noqa: PLC0415
    from kvstore.tools.bench.run import MIB, BenchOptions  # noqa: PLC0415

    program = shutil.which("redis-server") if redis else None
    redis_server = Path(program) if program else None
    try:
        if turns is not None:
            converse_and_print(turns, rounds, folder, redis_server, as_json=as_json)
            return
        options = BenchOptions(
            parse_geometry(geometry),
            batch_mib * MIB,
            rounds,
            folder=folder if disk else None,
            redis_server=redis_server,
            start=start,
            cache_server=server,
            gpu=gpu,
            vllm=vllm,
        )
        held = measure_and_print(options, plot=plot, compare_with=compare, as_json=as_json)
    except KVStoreError as error:
        give_up(error)
    if not held:
        raise typer.Exit(FAILED)
