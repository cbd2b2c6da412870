"""Output of ``kvstore simulate``: a table, the gain of each larger size, a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from math import inf, log
from pathlib import Path
from typing import Any

from rich.table import Table

from kvstore.tools.console import numbers
from kvstore.tools.figures import new_figure, save_figure
from kvstore.tools.simulate.cells import BEST, Cell, Scale

_PANELS_BESIDE = 2
_LETTER_WIDTH = 0.017  # as a fraction of a panel's axis
_MANY = 1000  # sizes from this on are shown without a fraction


def table(cells: Sequence[Cell], scale: Scale) -> Table:
    """Return a table of one trace's hit rates by policy and size, with the shares found in and written to each tier."""
    first = cells[0]
    unit = "chunks" if scale.bytes_per_token is None else "memory"
    below = "" if first.disk is None else f", disk of {scale.label(first.disk)}{_unit(scale)} below"
    sizes = numbers(*(scale.label(size) for size in dict.fromkeys(cell.size for cell in cells)))
    what = "Hit rates" if first.matching is None else "Tokens found of those asked"
    found = Table(unit, *sizes, caption=f"{what}, by size{below}.", caption_justify="left")
    for policy in _labels(cells):
        row = [cell for cell in cells if cell.label == policy]
        found.add_row(policy, *(f"{cell.hit_rate:.4f}" for cell in row))
        if policy == BEST:
            continue
        for place, name in enumerate(("memory", "disk")[: len(first.tiers)]):
            if first.disk is not None:
                found.add_row(f"  found in {name}", *(f"{_found_in(cell, place):.4f}" for cell in row), style="dim")
            found.add_row(
                f"  written to {name}" if first.disk is not None else "  written",
                *(_written(cell, place) for cell in row),
                style="dim",
            )
    return found


def gains(cells: Sequence[Cell], scale: Scale) -> Iterator[str]:
    """Yield a line for each policy, with the gain of each larger size."""
    for policy in _labels(cells):
        row = [cell for cell in cells if cell.label == policy]
        steps = [
            f"{scale.label(larger.size - smaller.size)}{_unit(scale)} on top of {scale.label(smaller.size)}: "
            f"{100 * (larger.hit_rate - smaller.hit_rate):+.1f} points{_memory_gain(smaller, larger)}"
            for smaller, larger in pairwise(row)
        ]
        if steps:
            yield f"{policy}: {'; '.join(steps)}"


def block_gains(cells: Sequence[Cell], scale: Scale) -> Iterator[str]:
    """Yield a line for each policy, with the gain of hits on blocks over hits on whole chunks and tails."""
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.matching is not None):
        row = [cell for cell in cells if cell.policy == policy]
        pairs = zip(*([cell for cell in row if cell.matching == way] for way in ("chunks", "blocks")), strict=True)
        steps = (
            f"{100 * (blocks.hit_rate - chunks.hit_rate):+.1f} points with {scale.label(blocks.size)}{_unit(scale)}"
            for chunks, blocks in pairs
        )
        yield f"{policy}: blocks instead of whole chunks and tails: {'; '.join(steps)}"


def plot(cells: Sequence[Cell], scale: Scale, file: Path) -> None:
    """Draw hit rate over size, one panel per trace and one curve per policy; the file's suffix chooses the format.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write this file.
    """
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    names = [Path(trace).name for trace in traces]
    columns = min(len(traces), _PANELS_BESIDE)
    rows = -(-len(traces) // columns)
    figure = new_figure(6.4 * columns, 4.8 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, trace, name in zip(panels, traces, names, strict=False):
        _draw_curves(axes, [cell for cell in cells if cell.trace == trace], scale)
        axes.set_title(name if names.count(name) == 1 else trace)
    for axes in panels[len(traces) :]:
        axes.set_axis_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 * columns, frameon=False)
    save_figure(figure, file)


def _draw_curves(axes: Any, cells: Sequence[Cell], scale: Scale) -> None:  # noqa: ANN401 - matplotlib's
    """Draw the curves of one trace, with hollow markers that keep overlapping curves distinguishable."""
    for policy, marker in zip(_labels(cells), cycle("os^Dv")):
        row = [cell for cell in cells if cell.label == policy]
        style: dict[str, object] = {"color": "black", "linestyle": "--"}
        if policy != BEST:
            style = {"marker": marker, "fillstyle": "none", "markersize": 9, "markeredgewidth": 1.5}
        axes.plot([cell.size for cell in row], [cell.hit_rate for cell in row], label=policy, **style)
    sizes = list(dict.fromkeys(cell.size for cell in cells))
    axes.set(xscale="log", ylabel="hit rate", ylim=(0, None))
    if len(sizes) == 1:
        axes.set_xlim(sizes[0] / 2, sizes[0] * 2)
    axes.set_xticks(*_ticks(sizes))
    axes.set_xticks([], minor=True)
    unit = (
        "chunks of memory" if scale.bytes_per_token is None else f"GiB of memory, {scale.bytes_per_token:,} B a token"
    )
    disk = cells[0].disk
    axes.set_xlabel(unit if disk is None else f"{unit}; disk of {scale.label(disk)}{_unit(scale)} below")
    axes.grid(visible=True, alpha=0.3)


def _ticks(sizes: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return the sizes with a tick on a logarithmic axis, and their labels, without labels that would overlap."""
    low, high = log(min(sizes)), log(max(sizes))
    kept: list[tuple[float, str]] = []
    end = -inf  # end of the last label, on an axis from 0 to 1
    for size in sorted(sizes):
        place = (log(size) - low) / (high - low) if high > low else 0.5
        label = f"{size:,g}" if size < _MANY else f"{size:,.0f}"
        half = _LETTER_WIDTH * len(label) / 2
        if place - half > end:
            kept.append((size, label))
            end = place + half + _LETTER_WIDTH
    return [size for size, _ in kept], [label for _, label in kept]


def _labels(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.label for cell in cells))


def _unit(scale: Scale) -> str:
    return " chunks" if scale.bytes_per_token is None else ""


def _memory_gain(smaller: Cell, larger: Cell) -> str:
    """Format the part of a gain that is in memory; empty without a disk."""
    if len(smaller.tiers) < 2:
        return ""
    return f" ({100 * (_found_in(larger, 0) - _found_in(smaller, 0)):+.1f} in memory)"


def _found_in(cell: Cell, place: int) -> float:
    """Return the part of a hit rate that one tier contributes."""
    unit = "hit_chunks" if cell.matching is None else "hit_tokens"
    hits = sum(tier[unit] for tier in cell.tiers)
    return cell.hit_rate * float(cell.tiers[place][unit]) / hits if hits else 0.0


def _written(cell: Cell, place: int) -> str:
    counts = cell.tiers[place]
    share = counts["written_chunks"] / counts["offered_chunks"] if counts["offered_chunks"] else 0.0
    volume = f", {counts['written_bytes'] / (1 << 30):,.0f} GiB" if "written_bytes" in counts else ""
    return f"{share:.0%}{volume}"
