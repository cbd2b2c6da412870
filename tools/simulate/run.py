"""Run of ``kvstore simulate``: parses its options, computes all cells with a progress bar, and prints them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from kvstore.model.errors import ConfigError
from kvstore.tools.console import bar, errors, parse_numbers
from kvstore.tools.figures import require_plotting
from kvstore.tools.simulate import report as simulate_report
from kvstore.tools.simulate.beside import side_by_side
from kvstore.tools.simulate.blocks import BlockTrace, load_blocks, parse_chunking, replay_blocks
from kvstore.tools.simulate.cells import (
    Cell,
    Scale,
    Trace,
    best,
    default_sizes,
    load,
    parse_policies,
    replay,
)
from kvstore.tools.simulate.options import Simulation

_SIZES = "numbers separated by commas, such as 1000,5000"


class SimulateOptions:
    """Options of a simulation. Without sizes, each trace gets default sizes.

    Raises:
        ConfigError: an option is wrong, or two options exclude each other.
    """

    def __init__(self, given: Simulation) -> None:
        size, chunks, disk, bytes_per_token = given.size, given.chunks, given.disk, given.bytes_per_token
        if size and bytes_per_token is None:
            raise ConfigError("--size needs --bytes-per-token: 2 x layers x KV heads x head size x bytes a number")
        if chunks and bytes_per_token is not None:
            raise ConfigError(
                "--chunks counts chunks, --bytes-per-token makes sizes bytes: use --size, or leave one out"
            )
        if disk is not None and disk <= 0:
            raise ConfigError(f"--disk is {disk:g}: it must be greater than 0; leave it out for no disk")
        sizes = parse_numbers(chunks, "--chunks", _SIZES, kind=int) if chunks else []
        sizes = parse_numbers(size, "--size", _SIZES) if size else sizes
        self.sizes, self.disk, self.scale = sorted({*sizes}), disk, Scale(bytes_per_token)
        self.best, self.answers = given.best, given.answers
        self.policies, self.warnings = parse_policies(given.policy or ())
        self.chunking = parse_chunking(given.block_tokens, given.chunk_tokens)


def simulate_and_print(
    paths: Sequence[Path], options: SimulateOptions, *, plot_file: Path | None, as_json: bool
) -> None:
    """Simulate all traces, print the results, and plot them to ``plot_file``, if it is given.

    Raises:
        ConfigError: a trace cannot be read, or the plot cannot be drawn.
    """
    for warning in options.warnings:
        errors().print(f"warning: {warning}")
    if plot_file is not None:
        require_plotting()
    chunking, scale = options.chunking, options.scale
    traces = [load(path, scale) if chunking is None else load_blocks(path, chunking) for path in paths]
    if not options.answers:
        traces = [trace.without_answers() for trace in traces]
    cells = [cell for trace in traces for cell in _with_progress(trace, options)]
    if plot_file is not None:
        simulate_report.plot(cells, scale, plot_file)
    if as_json:
        unit = "chunks" if scale.bytes_per_token is None else "GiB"
        of_blocks = {} if chunking is None else chunking._asdict()
        print(json.dumps({"unit": unit, **of_blocks, "cells": [asdict(cell) for cell in cells]}))
        return
    console = Console()
    for trace in traces:
        shown = [cell for cell in cells if cell.trace == trace.name]
        console.print(trace.name, soft_wrap=True, highlight=False, markup=False)
        console.print(simulate_report.table(shown, scale))
        for line in (*simulate_report.gains(shown, scale), *simulate_report.block_gains(shown, scale)):
            console.print(line, soft_wrap=True, highlight=False)


def _with_progress(trace: Trace | BlockTrace, options: SimulateOptions) -> list[Cell]:
    sizes = options.sizes or default_sizes(trace.distinct_size(options.scale), options.scale)
    works = _works(trace, sizes, options)
    with bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(trace.name, total=len(trace.chains) * len(works))
        return side_by_side(works, partial(progress.advance, task))


def _works(trace: Trace | BlockTrace, sizes: Sequence[float], options: SimulateOptions) -> list[Callable[..., Cell]]:
    """Return the work for each cell of a trace: every policy at every size, with the best possible, or by blocks."""
    disk, scale = options.disk, options.scale
    if isinstance(trace, BlockTrace):
        ways = itertools.product(options.policies, (False, True), sizes)
        return [
            partial(replay_blocks, trace, policy, size, disk=disk, scale=scale, block_ends=block_ends)
            for policy, block_ends, size in ways
        ]
    if scale.bytes_per_token is None:
        _ = trace.forest  # made once, before processes are forked
    return [
        *(
            partial(replay, trace, policy, size, disk=disk, scale=scale)
            for policy, size in itertools.product(options.policies, sizes)
        ),
        *(partial(best, trace, size, disk=disk, scale=scale) for size in sizes if options.best),
    ]
