"""Plot of a comparison: for each load, how many times lower the TTFT is than plain vLLM's, with its own noise."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.tools.bench.load import cpu_name
from kvstore.tools.figures import new_figure, save_figure
from kvstore.tools.outside.engines import AGAIN, KVSTORE
from kvstore.tools.outside.report import Row

_BARS: Final = (
    (AGAIN, "times_p50", "tab:gray", "plain vLLM again, p50"),
    (KVSTORE, "times_p50", "tab:blue", "kvstore, p50"),
    (KVSTORE, "times_p99", "tab:cyan", "kvstore, p99"),
)
_HEIGHT: Final = 0.8 / len(_BARS)


def plot(rows: list[Row], file: Path) -> None:
    """Draw a group of bars for each load, on a logarithmic scale.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write this file.
    """
    loads = list(dict.fromkeys(row.load for row in rows))[::-1]
    figure = new_figure(8.0, 1.6 + 0.8 * len(loads))
    axes = figure.subplots()
    axes.axvline(1.0, color="black", linestyle="--", zorder=0)
    for number, (engine, name, colour, label) in enumerate(_BARS):
        chosen = [(loads.index(row.load), getattr(row, name)) for row in rows if row.engine == engine]
        drawn = [(place + 0.4 - (number + 0.5) * _HEIGHT, times) for place, times in chosen if times is not None]
        widths, places = [times for _, times in drawn], [place for place, _ in drawn]
        axes.barh(places, widths, _HEIGHT, color=colour, label=label)
        for place, times in drawn:
            axes.text(times, place, f" {times:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(loads)), loads)
    axes.set(xscale="log", xlabel="times lower than plain vLLM's TTFT")
    axes.margins(x=0.12)
    figure.suptitle(f"load generators of others, on {cpu_name()}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(_BARS), frameon=False)
    save_figure(figure, file)
