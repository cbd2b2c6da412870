"""Parts of the bench that measure nothing: geometries, floors, lines, tables, pictures, comparisons."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvstore.model.errors import ConfigError
from kvstore.tools.bench import floors, plot
from kvstore.tools.bench.floors import Bound
from kvstore.tools.bench.geometry import GEOMETRIES, Geometry, parse_geometry
from kvstore.tools.bench.lines import Line, Subject
from kvstore.tools.bench.load import Load, Mark
from kvstore.tools.bench.plot import plot_report
from kvstore.tools.bench.report import (
    BenchReport,
    bench_table,
    change_table,
    compare,
    read_fractions,
    timed_table,
)
from kvstore.tools.bench.samples import Pair, Pairing
from kvstore.tools.bench.workbench import Workbench

TOY = Geometry("toy", layers=2, kv_heads=2, head_size=16, chunk_tokens=64)
SUBJECT = Subject("toy path", "memcpy", "nothing much")
QUIET = Load(cores=2, begin=0.3, end=1.4, others_cores=0.1)
BUSY = Load(cores=2, begin=6.7, end=7.1, others_cores=1.5)


def make_line(fraction: float, name: str = "toy path") -> Line:
    return Line(SUBJECT._replace(name=name), Bound(goal=0.8, floor=0.5), [Pair(fraction, 1.0)], size_bytes=1000)


def make_report(*lines: Line, load: Load = QUIET) -> BenchReport:
    return BenchReport(TOY, 3 * TOY.chunk_bytes, 7, list(lines), load)


def written(file: Path, report: BenchReport) -> Path:
    file.write_text(json.dumps(report.to_json()), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "chunk_bytes"),
    [
        ("llama-8b", 32 << 20),
        ("llama-70b-tp8", 10 << 20),
        ("qwen-0.5b", 3 << 20),
        ("deepseek-mla", 61 * 576 * 2 * 256),
    ],
)
def test_geometries_have_the_sizes_their_models_have(name: str, chunk_bytes: int) -> None:
    assert GEOMETRIES[name].chunk_bytes == chunk_bytes
    assert parse_geometry(name) is GEOMETRIES[name]


def test_a_geometry_by_numbers() -> None:
    text = "layers=28,kv_heads=4,head_size=128,block_tokens=32,chunk_tokens=512"
    assert parse_geometry(text) == Geometry(text, 28, 4, 128, block_tokens=32, chunk_tokens=512)
    latent = parse_geometry("layers=2,kv_heads=1,head_size=576,latent=1")
    assert latent.chunk_bytes == 2 * 576 * 2 * 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt-9", "llama-8b, llama-70b-tp8, qwen-0.5b, deepseek-mla"),
        ("layers=2,kv_heads=1", "does not say head_size"),
        ("layers=2,kv_heads=1,head_size=0", "'head_size=0' is no positive number"),
        ("layers=2,heads=1", "'heads=1' is no positive number of layers, kv_heads"),
        ("layers=2,kv_heads=1,head_size=8,block_tokens=48", "chunk_tokens must be a multiple"),
        ("layers=2,kv_heads=2,head_size=8,latent=1", "a latent has one head"),
    ],
)
def test_geometries_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_geometry(text)


@pytest.mark.parametrize("latent", [False, True])
def test_caches_have_the_bytes_of_their_geometry(latent: bool) -> None:
    geometry = Geometry("toy", layers=2, kv_heads=1, head_size=24, latent=latent, chunk_tokens=64)
    layout = Workbench(geometry, 1).paged.layout
    assert layout.payload_bytes(layout.blocks_per_chunk) == geometry.chunk_bytes


def test_floors_are_not_above_goals() -> None:
    bounds = [bound for lines in floors.BOUNDS.values() for bound in lines.values()]
    bounds += floors.COMMON.values()
    assert bounds
    assert all(0 <= bound.floor <= bound.goal for bound in bounds)
    assert set(floors.BOUNDS) <= set(GEOMETRIES)


def test_a_geometry_that_nobody_has_recorded_has_goals_and_no_floors() -> None:
    assert floors.bound_of("llama-8b", "CPU store").floor > 0
    assert floors.bound_of("toy", "CPU store") == Bound(floors.bound_of("llama-8b", "CPU store").goal, 0.0)
    assert floors.bound_of("toy", "redis store") == floors.COMMON["redis store"]


def test_fraction_is_the_median_over_pairs_not_the_ratio_of_medians() -> None:
    # Noise that affects path and limit alike keeps each pair's fraction, but not the ratio of the medians.
    pairs = [Pair(1.0, 2.0), Pair(10.0, 20.0), Pair(100.0, 100.0)]
    assert Line(SUBJECT, Bound(0.8, 0.4), pairs).fraction == 0.5


def test_p99_of_few_samples_is_the_slowest() -> None:
    line = Line(SUBJECT, Bound(0.8, 0.5), [Pair(1.0, float(seconds)) for seconds in range(1, 8)])
    assert line.p99_s == 7.0
    assert line.path_s == 4.0


@pytest.mark.parametrize(
    ("fraction", "verdict", "failed"),
    [(0.49, "BELOW FLOOR", True), (0.5, "below goal", False), (0.79, "below goal", False), (0.8, "ok", False)],
)
def test_verdict(fraction: float, verdict: str, failed: bool) -> None:
    line = make_line(fraction)
    assert (line.verdict, line.failed) == (verdict, failed)
    assert make_report(line, make_line(1.0)).failed == ([line] if failed else [])


def test_paired_runs_path_and_limit_in_the_order_asked_for() -> None:
    calls: list[str] = []

    def path() -> int:
        calls.append("path")
        return 7

    for limit_first in (True, False):
        assert Pairing(limit_first)(lambda: calls.append("limit"), path)[1] == 7
    assert calls == ["limit", "path", "path", "limit"]


def test_tables_say_fraction_p99_and_what_is_timed() -> None:
    report = make_report(make_line(0.75), make_line(0.2, "slow path"))
    printed = io.StringIO()
    Console(width=160, file=printed).print(bench_table(report), timed_table(report))
    text = printed.getvalue()
    for found in ("p99 of a call", "0.75", "BELOW FLOOR", "1000.0 ms", "nothing much", "3 chunks of"):
        assert found in text


def test_what_is_counted_is_shown_as_a_count() -> None:
    counted = Line(SUBJECT._replace(unit="bytes"), Bound(1.0, 1.0), [Pair(1024, 1005.3)])
    printed = io.StringIO()
    Console(width=160, file=printed).print(bench_table(make_report(counted)))
    assert "1,005 B" in printed.getvalue()
    assert "1,024 B" in printed.getvalue()
    tree = counted.to_json()
    assert (tree["median_bytes"], tree["samples_bytes"]) == (1005.3, [1005.3])
    assert not [key for key in tree if key.endswith("_s")]


@pytest.mark.parametrize(
    ("load", "is_busy"),
    [
        (QUIET, False),
        (BUSY, True),
        (QUIET._replace(begin=2.1), True),  # others were running before
        (QUIET._replace(others_cores=0.6), True),  # others started later
        (QUIET._replace(end=6.7), False),  # the bench's own load
    ],
)
def test_a_busy_machine(load: Load, is_busy: bool) -> None:
    assert load.is_busy == is_busy
    assert "on 2 cores" in load.warning


def test_others_are_who_used_the_rest() -> None:
    begin, end = Mark(10.0, 0.5, busy_s=100.0, own_s=3.0), Mark(20.0, 1.5, busy_s=118.0, own_s=11.0)
    assert begin.until(end)[1:] == (0.5, 1.5, 1.0)
    assert begin.until(end._replace(busy_s=100.0)).others_cores == 0, "a system that does not tell"


def test_what_failed_on_a_busy_machine_is_not_red() -> None:
    for load, colour in ((QUIET, "red"), (BUSY, "yellow")):
        report = make_report(make_line(0.2), load=load)
        printed = io.StringIO()
        Console(width=160, file=printed, force_terminal=True).print(bench_table(report))
        assert (f"[{31 if colour == 'red' else 33}mBELOW FLOOR") in printed.getvalue()
        assert f"load {load.begin}" in printed.getvalue()


def test_what_changed_since_an_older_run(tmp_path: Path) -> None:
    old = written(tmp_path / "old.json", make_report(make_line(0.8), make_line(0.5, "gone")))
    new = make_report(make_line(0.6), make_line(0.9, "new"))
    changes = {change.name: change for change in compare(read_fractions(old, "toy"), new)}
    assert list(changes) == ["toy path", "new", "gone"]
    assert changes["toy path"].share == pytest.approx(-0.25)
    assert changes["toy path"].is_loss
    assert not changes["toy path"].is_gain
    assert changes["new"].share is None
    assert changes["gone"].now is None
    assert change_table(list(changes.values()), "old.json").row_count == 3


def test_noise_is_no_change(tmp_path: Path) -> None:
    old = read_fractions(written(tmp_path / "old.json", make_report(make_line(0.8))), "toy")
    (change,) = compare(old, make_report(make_line(0.75)))
    assert not change.is_loss
    assert not change.is_gain


def test_another_geometry_is_not_compared(tmp_path: Path) -> None:
    old = written(tmp_path / "old.json", make_report(make_line(0.8)))
    with pytest.raises(ConfigError, match="of geometry toy, and this run of llama-8b"):
        read_fractions(old, "llama-8b")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"geometry": {"name": "toy"}, "lines": [{}]}'])
def test_what_is_no_older_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not what kvstore bench --json writes"):
        read_fractions(tmp_path / "old.json", "toy")


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: the extra `plot`")
    plot_report(make_report(make_line(0.75), make_line(3.0, "fast")), tmp_path / "bench.svg")
    assert b"<svg" in (tmp_path / "bench.svg").read_bytes()
    plot_report(make_report(), tmp_path / "nothing.svg")  # interrupted before the first line


def test_a_picture_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has verdicts, goal and limit in a legend, the machine and its load, and the end of a bar that is cut."""
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: the extra `plot`")
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, _file: drawn.append(figure))
    monkeypatch.setattr(plot, "cpu_name", lambda: "a processor")
    plot_report(make_report(make_line(0.2), make_line(0.6), make_line(0.9), make_line(3.0), load=BUSY), tmp_path)
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ok", "below goal", "below floor", "goal", "limit"]
    assert all(said in figure.get_suptitle() for said in ("toy, on a processor", str(BUSY), "BUSY: run again"))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count(plot._CUT) == 1
    assert "0.20 of memcpy: BELOW FLOOR" in texts


def test_batches_are_fresh() -> None:
    workbench = Workbench(TOY, 2)
    slots = workbench.new_batch()
    first, tokens = workbench._data.copy(), workbench.tokens
    assert sorted(slots.tolist()) == sorted(set(slots.tolist()))
    assert len(tokens) == workbench.num_tokens == len(slots)
    workbench.new_batch()
    assert (workbench._data != first).mean() > 0.9
    assert workbench.tokens != tokens


def test_the_workbench_fills_what_it_compares() -> None:
    workbench = Workbench(TOY, 1)
    slots = workbench.new_batch()
    block_ids = slots.reshape(-1, TOY.block_tokens)[:, 0] // TOY.block_tokens
    assert torch.equal(workbench._caches[1][block_ids], workbench._expected[1])
