"""Run of ``kvstore simulate``: parses its options, computes all cells with a progress bar, and prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from kvstore.model.errors import ConfigError
from kvstore.tools.console import bar, errors, parse_numbers
from kvstore.tools.figures import require_plotting
from kvstore.tools.simulate import report as simulate_report
from kvstore.tools.simulate.blocks import BlockTrace, load_blocks, parse_chunking, replay_blocks
from kvstore.tools.simulate.cells import (
    Cell,
    Scale,
    Tick,
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
        self.sizes, self.disk, self.scale, self.best = sorted({*sizes}), disk, Scale(bytes_per_token), given.best
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
    ways = 2 * len(options.policies) if isinstance(trace, BlockTrace) else len(options.policies) + options.best
    with bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(trace.name, total=len(trace.chains) * len(sizes) * ways)
        return simulate(trace, sizes, options, partial(progress.advance, task))


def simulate(trace: Trace | BlockTrace, sizes: Sequence[float], options: SimulateOptions, tick: Tick) -> list[Cell]:
    """Return all cells of one trace: every policy at every size, with the best possible, or by chunks and by blocks."""
    if isinstance(trace, BlockTrace):
        return [
            replay_blocks(trace, policy, size, disk=options.disk, scale=options.scale, tick=tick, block_ends=block_ends)
            for policy in options.policies
            for block_ends in (False, True)
            for size in sizes
        ]
    cells = [
        replay(trace, policy, size, disk=options.disk, scale=options.scale, tick=tick)
        for policy in options.policies
        for size in sizes
    ]
    for size in sizes if options.best else ():
        cells.append(best(trace, size, options.disk, options.scale))
        tick(len(trace.chains))
    return cells
