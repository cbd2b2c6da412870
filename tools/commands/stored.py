"""``kvstore inspect`` and ``kvstore verify``: what is stored, and whether it is sound."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import KVStoreError
from kvstore.tools.console import FAILED, AsJson, give_up, progress, size

_SHOWN_FAULTS = 50


def inspect(
    target: Annotated[str, typer.Argument(help="A chunk file, a folder of chunks, a pack, or a key in hex.")],
    *,
    folder: Annotated[Path | None, typer.Option(help="Where to look for a key.", file_okay=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a chunk, a folder or a pack holds: namespace, tokens, codec, sizes.

    A chunk that stands in its folder is checked too: exits with 1 if it is damaged, with 2 if there is no such thing.
    """
    from kvstore.tools.inspection import inspect_target, lines  # noqa: PLC0415

    try:
        tree = inspect_target(target, folder=folder)
    except KVStoreError as error:
        give_up(error)
    print(json.dumps(tree) if as_json else "\n".join(lines(tree)))
    if tree.get("sound") is False:
        raise typer.Exit(FAILED)


def verify(
    target: Annotated[str, typer.Argument(help="A folder of chunks, an engine's or a server's, a pack, or a Redis.")],
    *,
    fix: Annotated[bool, typer.Option(help="Move damaged files to .quarantine; in Redis, remove.")] = False,
    remove: Annotated[bool, typer.Option(help="With --fix: delete damaged files instead of moving them.")] = False,
    password: Annotated[str | None, typer.Option(envvar="KVSTORE_REMOTE_PASSWORD", help="Of the Redis.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every chunk and check key, namespace, length, format version and checksums.

    --fix touches files of chunks that were read twice and are damaged, and nothing else; each of them is listed. Works
    beside a running engine, but for --fix on a folder. Exits with 1 if there are damaged chunks, fixed or not, and with
    2 if the target cannot be read.
    """
    from kvstore.tools.verify import verify as run  # noqa: PLC0415

    try:
        with progress("chunks") as bar:
            task = bar.add_task("verifying", total=None, rate="")

            def tick(total: int, _size_bytes: int) -> None:
                speed = bar.tasks[0].speed
                bar.update(task, total=total, advance=1, rate=f"{speed:,.0f}" if speed else "")

            options = {"password": password} if password else {}
            report = run(target, fix=fix, remove=remove, options=options, tick=tick)
    except KVStoreError as error:
        give_up(error)
    if as_json:
        faults = [fault._asdict() for fault in report.faults]
        print(json.dumps({**asdict(report), "faults": faults, "fixed": report.fixed}))
    else:
        left = [fault for fault in report.faults if not fault.fixed]
        for fault in report.faults:
            if fault.fixed:
                print(f"{fault.place}: {fault.damage}")
        for fault in left[:_SHOWN_FAULTS]:
            print(f"{fault.place}: {fault.damage}{', left as it is' if fix else ''}")
        if len(left) > _SHOWN_FAULTS:
            print(f"... and {len(left) - _SHOWN_FAULTS} more: --json names all")
        for home in report.left:
            print(
                f"{home}: no chunk here is sound, so the note on their geometry may be what is wrong: nothing changed"
            )
        fixed = f", {report.fixed} {'removed' if remove else 'set aside'}" if fix else ""
        print(f"{report.chunks:,} chunks, {size(report.size_bytes)} sound, {len(report.faults):,} damaged{fixed}")
        if report.faults:
            print("damaged chunks are never served: an engine finds them when it reads them, and computes instead")
    if report.faults:
        raise typer.Exit(FAILED)
