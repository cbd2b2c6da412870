"""Command ``kvstore bench``."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools.console import AsJson

BENCH_FOLDER = Path("/var/tmp")  # noqa: S108 - on a disk where /tmp may be memory; the folder made in it is private


@dataclass(frozen=True)
class Parts:
    """Parts to measure in addition to memory."""

    disk: Annotated[bool, typer.Option(help="Measure the disk.")] = True
    start: Annotated[bool, typer.Option(help="Measure importing the library and opening an engine.")] = True
    redis: Annotated[bool, typer.Option(help="Measure Redis, if redis-server is on the PATH.")] = True
    mooncake: Annotated[bool, typer.Option(help="Measure Mooncake Store, if it is installed.")] = True
    objects: Annotated[
        bool, typer.Option(help="Measure an object store in memory, and SeaweedFS, if weed is installed.")
    ] = True
    server: Annotated[bool, typer.Option(help="Measure the cache server.")] = True
    handover: Annotated[bool, typer.Option(help="Measure hand-overs to another process.")] = True
    proxy: Annotated[bool, typer.Option(help="Measure the proxy.")] = True
    gpu: Annotated[bool, typer.Option(help="Measure a GPU, if there is one.")] = True
    vllm: Annotated[bool, typer.Option(help="Measure real vLLM, if it is installed; takes minutes.")] = True


def bench(
    *,
    geometry: Annotated[
        str,
        typer.Option(
            help="Model whose KV is moved: llama-8b, llama-70b-tp8, qwen-0.5b, deepseek-mla, or "
            "layers=28,kv_heads=4,head_size=128."
        ),
    ] = "llama-8b",
    batch_mib: Annotated[
        int, typer.Option(help="MiB that one call moves; the bench uses about eight times as much memory.")
    ] = 256,
    rounds: Annotated[int, typer.Option(min=7, help="Samples of each line.")] = 15,
    folder: Annotated[
        Path, typer.Option(help="Folder on the disk to measure.", exists=True, file_okay=False)
    ] = BENCH_FOLDER,
    parts: Parts,
    plot: Annotated[Path | None, typer.Option(help="Draw bars against the limit into this .svg, .png or .pdf.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Compare with an older run, the output of --json.")] = None,
    turns: Annotated[
        str | None,
        typer.Option(help="Run conversations over real vLLM instead: all, or example,memory,disk,redis,server."),
    ] = None,
    bidirectional: Annotated[
        bool,
        typer.Option(
            "--bidirectional",
            help="Run chats over a prefill and a decode engine instead: real vLLM.",
        ),
    ] = False,
    users: Annotated[
        str | None,
        typer.Option(
            help="Instead count the tokens computed for 200 users behind one system prompt, with caches that hold "
            "these shares of their KV, such as 1,0.33."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every path against the limit of this machine, in one run.

    Exits with 1 if a fraction is below its recorded floor, or if a path lost a byte; with 130 if interrupted, after
    showing what was measured.
    """
    from kvstore.tools.bench.command import (  # noqa: PLC0415
        converse_and_print,
        count_and_print,
        measure_and_print,
        measure_both_ways_and_print,
    )
    from kvstore.tools.bench.geometry import parse_geometry  # noqa: PLC0415
    from kvstore.tools.bench.run import MIB, BenchOptions  # noqa: PLC0415

    if users is not None:
        count_and_print(users, parse_geometry(geometry), as_json=as_json)
        return
    if bidirectional:
        raise typer.Exit(measure_both_ways_and_print(rounds, folder, as_json=as_json))
    program = shutil.which("redis-server") if parts.redis else None
    redis_server = Path(program) if program else None
    if turns is not None:
        code = converse_and_print(turns, rounds, folder, redis_server, as_json=as_json)
        raise typer.Exit(code)
    options = BenchOptions(
        parse_geometry(geometry),
        batch_mib * MIB,
        rounds,
        folder=folder if parts.disk else None,
        redis_server=redis_server,
        mooncake=parts.mooncake,
        objects=parts.objects,
        weed=_weed() if parts.objects else None,
        start=parts.start,
        cache_server=parts.server,
        handover=parts.handover,
        proxy=parts.proxy,
        gpu=parts.gpu,
        vllm=parts.vllm,
    )
    raise typer.Exit(measure_and_print(options, plot=plot, compare_with=compare, as_json=as_json))


def _weed() -> Path | None:
    """Return SeaweedFS's program, beside this Python or on the PATH; None without one."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    return Path(found) if found else None
