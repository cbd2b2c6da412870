"""Run of ``kvstore simulate --fleet``: all fleets of a file, with a progress bar, and their comparison."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.model.errors import ConfigError
from kvstore.tools.console import bar, errors, numbers
from kvstore.tools.simulate.beside import side_by_side
from kvstore.tools.simulate.cells import parse_policies
from kvstore.tools.simulate.fleet import FleetCell, simulate_fleet
from kvstore.tools.simulate.fleetfile import FleetPlan, read_fleet
from kvstore.tools.simulate.options import Simulation
from kvstore.tools.simulate.replica import GPU

_BUSY = 0.95  # from which on a fleet falls behind


def simulate_fleets_and_print(
    paths: Sequence[Path], fleet_file: Path, given: Simulation, *, plot_file: Path | None, as_json: bool
) -> None:
    """Simulate the fleets of a file over all traces, and print the results.

    Raises:
        ConfigError: an option or the file is wrong, a trace cannot be read, or a fleet is too small.
    """
    _check(given, plot_file)
    plan = read_fleet(fleet_file)
    policies, warnings = parse_policies(given.policy or plan.policy)
    for warning in warnings:
        errors().print(f"warning: {warning}")
    cells = [FleetCell(*cell) for cell in itertools.product(policies, plan.replicas, plan.router)]
    found = {str(path): _with_progress(path, plan, cells, answers=given.answers) for path in paths}
    if as_json:
        rows = [{"trace": trace, **row} for trace, each in found.items() for row in each]
        print(json.dumps({"fleet": plan.model_dump(exclude_none=True), "cells": rows}))
        return
    console = Console()
    for trace, rows in found.items():
        console.print(trace, soft_wrap=True, highlight=False, markup=False)
        console.print(table(rows))
        for line in remarks(rows):
            console.print(line, soft_wrap=True, highlight=False)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a line for each fleet."""
    tiers = list(rows[0]["tiers"])
    found = Table("fleet", *numbers("loaded", *tiers, "TTFT p50", "p99", "busy"))
    for row in rows:
        found.add_row(
            _name(row),
            f"{row['hit_rate']:.4f}",
            *(f"{row['tiers'][tier]['hit_rate']:.4f}" for tier in tiers),
            *(f"{row['ttft_s'][name]:,.2f} s" for name in ("p50", "p99")),
            f"{row['busy']:.0%}",
        )
    return found


def remarks(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line with the bytes that moved in each fleet and its cost, and one for each fleet that falls behind."""
    for row in rows:
        moved = ", ".join(
            f"{name} {tier['read_bytes'] / 1e9:,.0f} read and {tier['written_bytes'] / 1e9:,.0f} written"
            for name, tier in row["tiers"].items()
            if name != GPU
        )
        if row["declined_tokens"]:
            share = row["declined_tokens"] / row["asked_tokens"]
            yield f"{_name(row)}: {share:.1%} of the tokens were found, but computed, as loading them would be slower"
        yield f"{_name(row)}: GB in {row['span_s']:,.0f} s: {moved}; {_cost(row)}"
        if row["busiest"] > _BUSY:
            yield f"{_name(row)}: falls behind: up to {row['most_waiting']:,} requests wait, so add replicas"


def _cost(row: dict[str, Any]) -> str:
    hours, cost = {name: seconds / 3600 for name, seconds in row["gpu_s"].items()}, row["cost"]
    price = {name: "" if cost is None else f" ({cost[name]:,.2f})" for name in hours}
    return f"prefill {hours['computing']:,.1f} GPU h{price['computing']}, saved {hours['saved']:,.1f}{price['saved']}"


def _name(row: dict[str, Any]) -> str:
    return f"{row['replicas']} {row['router']} {row['policy']}"


def _check(given: Simulation, plot_file: Path | None) -> None:
    others = {
        "--chunks": given.chunks,
        "--size": given.size,
        "--disk": given.disk,
        "--bytes-per-token": given.bytes_per_token,
        "--block-tokens": given.block_tokens,
        "--chunk-tokens": given.chunk_tokens,
        "--plot": plot_file,
    }
    for option, value in others.items():
        if value:
            raise ConfigError(f"{option} and --fleet exclude each other: the fleet's file gives all sizes")


def _with_progress(path: Path, plan: FleetPlan, cells: Sequence[FleetCell], *, answers: bool) -> list[dict[str, Any]]:
    works = [partial(simulate_fleet, path, plan, cell, answers=answers) for cell in cells]
    with bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(str(path), total=_num_lines(path) * len(works))
        return side_by_side(works, partial(progress.advance, task))


def _num_lines(path: Path) -> int:
    """Count the lines of a trace, about as many as it has requests."""
    try:
        with path.open("rb") as file:
            return sum(1 for _ in file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
