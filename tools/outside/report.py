"""Report of a comparison: figures by load and engine, their ratios to plain vLLM, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

from rich.table import Table

from kvstore.tools.console import numbers
from kvstore.tools.outside.engines import ENGINES, KVSTORE, LEFT_OUT, PLAIN
from kvstore.tools.outside.generator import Numbers
from kvstore.tools.outside.run import GENERATORS, OUTPUTS, Comparison, Run

HEADLINE: Final = "vllm-bench-prefix"
"""Load whose hits are those of others' claims."""
CLAIMS: Final = (
    "others' claims, on GPUs: Mooncake, 46 times lower at 92% hits, and vLLM's native offloading, up to 22 times; "
    "requests that queue multiply such ratios, and here none does"
)


@dataclass(frozen=True)
class Row:
    """Figures of a load on an engine: medians of the rounds, and medians of the ratios to plain vLLM by round.

    Attributes:
        load: name of the load.
        engine: name of the engine.
        rounds: rounds in which it ran.
        ttft_p50_s: median time to the first token.
        ttft_p99_s: its 99th percentile.
        requests_per_s: finished requests per second.
        requests: finished requests of all rounds.
        failed: failed requests of all rounds, and failed runs.
        own_hits: share of the prompts' tokens that vLLM's own cache had.
        loaded: share of the prompts' tokens that kvstore had.
        times_p50: how many times lower the median TTFT is than plain vLLM's; None without plain vLLM.
        times_p99: the same of the 99th percentile.
        times_faster: how many times more requests are finished per second.
        own: further figures of the generator.
    """

    load: str
    engine: str
    rounds: int
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_s: float
    requests: int
    failed: int
    own_hits: float
    loaded: float
    times_p50: float | None
    times_p99: float | None
    times_faster: float | None
    own: dict[str, float]


@dataclass(frozen=True)
class Outputs:
    """Comparison of the answers to fixed prompts with those of plain vLLM.

    Attributes:
        compared: compared answers.
        different: answers that differ.
        loaded_tokens: tokens that kvstore loaded for them.
    """

    compared: int
    different: int
    loaded_tokens: int


def rows_of(comparison: Comparison) -> list[Row]:
    """Return the rows of all loads that ran, in the order of the generators."""
    return [row for one in GENERATORS for engine in ENGINES if (row := _row(comparison, one.name, engine)) is not None]


def outputs_of(comparison: Comparison) -> Outputs:
    """Compare the answers of every engine with those that plain vLLM gave first in the same round."""
    compared = different = loaded = 0
    for run in comparison.runs:
        plain = comparison.find(OUTPUTS, PLAIN, run.round)
        if run.load != OUTPUTS or plain is None:
            continue
        half = len(plain.texts) // 2
        compared += len(run.texts)
        different += sum(text != plain.texts[number % half] for number, text in enumerate(run.texts))
        loaded += run.counts.loaded_tokens
    return Outputs(compared, different, loaded)


def failures_of(comparison: Comparison) -> list[str]:
    """Return what went wrong: runs that failed, failed requests, outputs that differ, and missing hits."""
    found = [f"{run.load} on {run.engine}: {run.error}" for run in comparison.runs if run.error]
    rows, outputs = rows_of(comparison), outputs_of(comparison)
    found += [f"{row.load} on {row.engine}: {row.failed} requests failed" for row in rows if row.failed]
    if outputs.different:
        found.append(f"outputs: {outputs.different} of {outputs.compared} differ from plain vLLM's")
    for run in comparison.runs:
        if (run.load, run.engine) == (OUTPUTS, KVSTORE) and not run.counts.loaded_tokens:
            found.append("outputs: kvstore loaded nothing, so they show nothing")
        if not (run.error or run.counts.has_moved_all):
            hits, moved = f"{run.counts.loaded_tokens:,} tokens as hits", f"{run.counts.loaded_bytes:,} bytes"
            found.append(f"{run.load} on {run.engine}: vLLM counted {hits}, and only {moved} were loaded")
    return found


def headline(rows: list[Row]) -> str:
    """Return the statement on the load whose hits are those of others' claims; empty if it did not run."""
    ours, control = (
        next((row for row in rows if (row.load, row.engine) == (HEADLINE, engine)), None)
        for engine in (KVSTORE, ENGINES[1])
    )
    if ours is None or ours.times_p50 is None:
        return ""
    noise = f"plain vLLM against itself {control.times_p50:.2f}" if control and control.times_p50 else "no control"
    hits = ours.own_hits + ours.loaded
    return f"TTFT p50 {ours.times_p50:.1f} times lower, p99 {ours.times_p99:.1f}, at {hits:.0%} hits ({noise})"


def to_json(comparison: Comparison) -> dict[str, object]:
    """Return the report as one JSON object; times are in seconds."""
    rows = rows_of(comparison)
    return {
        "rounds": comparison.rounds,
        "headline": headline(rows),
        "claims": CLAIMS,
        "loads": {one.name: one.about for one in GENERATORS},
        "rows": [asdict(row) for row in rows],
        "outputs": asdict(outputs_of(comparison)),
        "skipped": comparison.skipped,
        "left_out": LEFT_OUT,
        "failures": failures_of(comparison),
    }


def table_of(comparison: Comparison) -> Table:
    """Return a table of all rows."""
    figures = numbers(*TITLES[2:])
    table = Table(*TITLES[:2], *figures, title=f"load generators of others, {comparison.rounds} rounds")
    last = ""
    for row in rows_of(comparison):
        if last and row.load != last:
            table.add_section()
        table.add_row("" if row.load == last else row.load, row.engine, *cells(row))
        last = row.load
    return table


TITLES: Final = (
    "load",
    "engine",
    "TTFT p50",
    "times",
    "TTFT p99",
    "times",
    "requests/s",
    "times",
    "hits: vLLM",
    "kvstore",
    "failed",
)


def cells(row: Row) -> Iterator[str]:
    """Yield a row's figures as texts, as ``TITLES`` from the third one on."""
    yield f"{row.ttft_p50_s * 1e3:,.0f} ms"
    yield _times(row.times_p50)
    yield f"{row.ttft_p99_s * 1e3:,.0f} ms"
    yield _times(row.times_p99)
    yield f"{row.requests_per_s:.2f}"
    yield _times(row.times_faster)
    yield f"{row.own_hits:.0%}"
    yield f"{row.loaded:.0%}"
    yield str(row.failed)


def about(load: str) -> str:
    """Return the description of a load."""
    return next(one.about for one in GENERATORS if one.name == load)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _row(comparison: Comparison, load: str, engine: str) -> Row | None:
    """Return a row; None if the load has not run on the engine, or failed in every round."""
    runs = [run for run in comparison.runs if (run.load, run.engine) == (load, engine)]
    done = [(run, run.numbers) for run in runs if run.numbers is not None]
    if not done:
        return None
    asked = max(1, sum(run.counts.prompt_tokens for run, _ in done))

    def median(value: Callable[[Numbers], float]) -> float:
        return statistics.median(value(found) for _, found in done)

    def ratio(value: Callable[[Numbers], float], *, inverse: bool = False) -> float | None:
        pairs = [(value(plain), value(found)) for run, found in done if (plain := _plain(comparison, run)) is not None]
        ratios = [ours / plain if inverse else plain / ours for plain, ours in pairs if plain > 0 and ours > 0]
        return statistics.median(ratios) if ratios else None

    return Row(
        load,
        engine,
        len(done),
        median(lambda found: found.ttft_p50_s),
        median(lambda found: found.ttft_p99_s),
        median(lambda found: found.requests_per_s),
        sum(found.requests for _, found in done),
        sum(found.failed for _, found in done),
        sum(run.counts.own_hit_tokens for run, _ in done) / asked,
        sum(run.counts.loaded_tokens for run, _ in done) / asked,
        ratio(lambda found: found.ttft_p50_s),
        ratio(lambda found: found.ttft_p99_s),
        ratio(lambda found: found.requests_per_s, inverse=True),
        {name: statistics.median(found.own[name] for _, found in done) for name in done[0][1].own},
    )


def _plain(comparison: Comparison, run: Run) -> Numbers | None:
    """Return the figures of plain vLLM for the same load in the same round."""
    plain = comparison.find(run.load, PLAIN, run.round)
    return None if plain is None else plain.numbers
