"""Commands ``inspect``, ``verify`` and ``sweep``, which show, check and bound stored chunks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools.commands.options import Password
from kvstore.tools.console import FAILED, Answer, chunk_progress, size
from kvstore.tools.interrupts import INTERRUPTED, interruptible

_MAX_SHOWN = 50


def inspect(
    target: Annotated[str, typer.Argument(help="A chunk file, a folder, a pack, a store's URL, or a key.")],
    *,
    folder: Annotated[Path | None, typer.Option(help="Folder to search for the key.", file_okay=False)] = None,
) -> Answer:
    """Show what a chunk, a folder or a pack holds: namespace, tokens, codec, sizes.

    A chunk in its folder is also checked. Exits with 1 if it is damaged, and with 2 if the target does not exist.
    """
    from kvstore.tools.inspection import inspect_target, lines  # noqa: PLC0415

    tree = inspect_target(target, folder=folder)
    return Answer(tree, lines(tree), FAILED if tree.get("sound") is False else 0)


def verify(
    target: Annotated[str, typer.Argument(help="An engine's or a server's folder, a pack, or a URL as in remote_url.")],
    *,
    fix: Annotated[bool, typer.Option(help="Move damaged files to .quarantine; in a store, delete them.")] = False,
    remove: Annotated[bool, typer.Option(help="With --fix: delete damaged files instead of moving them.")] = False,
    password: Password = None,
) -> Answer:
    """Read every chunk and check its key, namespace, length, format version and checksums.

    --fix touches only files of chunks that were read twice and are damaged, and lists each of them. An engine may be
    running, except for --fix on its folder. Exits with 1 if chunks are damaged, fixed or not, with 2 if the target
    cannot be read, and with 130 if interrupted.
    """
    from kvstore.tools.verify import verify as run  # noqa: PLC0415

    finishing = "finishing the chunk under way, then telling what was found"
    with chunk_progress("verifying") as tick, interruptible(finishing) as should_stop:
        options = {"password": password} if password else {}
        report = run(target, fix=fix, remove=remove, options=options, tick=tick, should_stop=should_stop)
    left = [fault for fault in report.faults if not fault.fixed]
    text = [str(fault) for fault in report.faults if fault.fixed]
    text += [f"{fault}{', left as it is' if fix else ''}" for fault in left[:_MAX_SHOWN]]
    if len(left) > _MAX_SHOWN:
        text.append(f"... and {len(left) - _MAX_SHOWN} more: --json names all")
    for home in report.left:
        text.append(f"{home}: nothing changed: no chunk is sound, so the note on their geometry may be what is wrong")
    fixed = f", {report.fixed} {'removed' if remove else 'set aside'}" if fix else ""
    text.append(f"{report.chunks:,} chunks, {size(report.size_bytes)} sound, {len(report.faults):,} damaged{fixed}")
    if report.faults:
        text.append("damaged chunks are never served: an engine finds them when it reads them, and computes instead")
    tree = asdict(report) | {"fixed": report.fixed}
    if report.unread:
        return Answer(tree, text, INTERRUPTED, [f"interrupted: {report.unread:,} chunks were not read"])
    return Answer(tree, text, FAILED if report.faults else 0)


def sweep(
    url: Annotated[str, typer.Argument(help="A store of objects or a shared folder, as in remote_url.")],
    *,
    max_size: Annotated[float | None, typer.Option(help="GiB that all chunks may take.", min=0.0)] = None,
    max_age: Annotated[float | None, typer.Option(help="Days since a chunk was used last.", min=0.0)] = None,
    dry_run: Annotated[bool, typer.Option(help="Only tell what would be removed.")] = False,
) -> Answer:
    """Remove garbage and what exceeds the limits, the longest unused first, and compact the log.

    Engines may be running. Run it every few minutes to hours, from one place or from several: one sweeps at a time.
    Exits with 2 if the storage cannot be used, or another sweep is under way.
    """
    from kvstore.tools.sweeping import sweep_url  # noqa: PLC0415

    with chunk_progress("sweeping") as tick:
        report = sweep_url(url, max_size_gib=max_size, max_age_days=max_age, dry_run=dry_run, tick=tick)
    done = "would be removed" if dry_run else "removed"
    left = f"{report.removed_chunks:,} {done}, {size(report.removed_bytes)}"
    odd = f"{report.found_chunks:,} chunks that none named, {report.lost_chunks:,} that are gone"
    text = [
        f"{report.chunks:,} chunks, {size(report.size_bytes)}: {left}",
        f"{report.garbage_objects:,} objects of garbage {done}, {size(report.garbage_bytes)}",
        f"{report.manifests:,} manifests {'read' if dry_run else 'became one for each namespace'}; {odd}",
    ]
    return Answer(asdict(report), text)
