"""``kvstore simulate``: what it counts, what it prints, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.policies import POLICIES, open_policy
from kvstore.policies.simulation import SimulatedStore, best_hits
from kvstore.tools.cli import app
from kvstore.tools.simulate import report
from kvstore.tools.simulate.cells import Cell, Scale
from kvstore.tools.simulate.report import _ticks

RUNNER = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three chains of four blocks in turn, of which the last block is half full."""
    chains = [[100, 101, 102, 103], [200, 201, 202, 203], [300, 301, 302, 303]]
    lines = [{"timestamp": 0, "input_length": 3 * 512 + 256, "hash_ids": chains[number % 3]} for number in range(30)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def cells(*arguments: str) -> list[dict[str, Any]]:
    result = RUNNER.invoke(app, ["simulate", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["cells"]
    return found


def test_every_policy_and_the_best_possible(trace: Path) -> None:
    found = cells(str(trace), "--chunks", "8,12")
    assert [(cell["policy"], cell["size"]) for cell in found] == [
        (policy, size) for policy in [*POLICIES, "best possible"] for size in (8, 12)
    ]
    enough = [cell["hit_rate"] for cell in found if cell["size"] == 12]
    assert enough == [pytest.approx(27 / 30)] * (len(POLICIES) + 1), "with room for all only the first uses are missed"
    assert all(cell["hit_rate"] <= found[-2]["hit_rate"] for cell in found if cell["size"] == 8)
    assert found[0]["hit_rate"] == 0.0, "LRU: a loop that does not fit"


def test_sizes_in_bytes_count_tails_as_what_they_are(trace: Path) -> None:
    mib = 1 << 20
    per_token = mib // 4
    total = 3 * (3 * 512 + 256) * per_token / (1 << 30)
    (cell,) = cells(
        str(trace), "--size", str(total), "--bytes-per-token", str(per_token), "--policy", "lru", "--no-best"
    )
    assert cell["hit_bytes"] == 27 * (3 * 512 + 256) * per_token
    assert cell["used_bytes"] == 30 * (3 * 512 + 256) * per_token
    assert cell["tiers"][0]["written_bytes"] == round(total * (1 << 30))
    (smaller,) = cells(
        str(trace), "--size", str(total * 0.99), "--bytes-per-token", str(per_token), "--policy", "lru", "--no-best"
    )
    assert smaller["hit_bytes"] < cell["hit_bytes"]


def test_a_disk_finds_what_memory_lost(trace: Path) -> None:
    (cell,) = cells(str(trace), "--chunks", "4", "--disk", "12", "--policy", "LRU", "--no-best")
    memory, disk = cell["tiers"]
    assert (memory["hit_chunks"], disk["hit_chunks"]) == (0, 27 * 4)
    assert (disk["written_chunks"], disk["evicted_chunks"]) == (12, 0)
    assert cell["hit_rate"] == pytest.approx(27 / 30)


def test_sizes_follow_from_the_trace(trace: Path) -> None:
    assert [cell["size"] for cell in cells(str(trace), "--policy", "LRU", "--no-best")] == [1, 4, 12]


def test_the_table_says_what_more_room_brings(trace: Path) -> None:
    result = RUNNER.invoke(app, ["simulate", str(trace), "--chunks", "4,12", "--policy", "LRU"])
    assert result.exit_code == 0
    assert "LRU: 8 chunks on top of 4: +90.0 points" in result.stdout
    assert "0.9000" in result.stdout


def test_a_policy_of_lmcache_is_named_with_what_is_used(trace: Path) -> None:
    result = RUNNER.invoke(app, ["simulate", str(trace), "--chunks", "4", "--policy", "MRU", "--json", "--no-best"])
    assert [cell["policy"] for cell in json.loads(result.stdout)["cells"]] == ["ADAPTIVE"]
    assert "warning: cache_policy 'MRU' is not available: ADAPTIVE is used instead" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "10"], "--size needs --bytes-per-token"),
        (["--chunks", "10", "--bytes-per-token", "4"], "use --size"),
        (["--chunks", "1.5"], "--chunks is '1.5'"),
        (["--chunks", "0,5"], "greater than 0"),
        (["--size", "nan", "--bytes-per-token", "4"], "greater than 0"),
        (["--disk", "0"], "--disk is 0"),
        (["--policy", "clock"], "cache_policy is 'clock': use one of LRU"),
    ],
)
def test_wrong_options(trace: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["simulate", str(trace), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n", encoding="utf-8")
    result = RUNNER.invoke(app, ["simulate", str(tmp_path / "notes.txt")])
    assert result.exit_code == 2
    assert "notes.txt, line 1 is no request of a trace" in result.stderr


def test_without_matplotlib_the_extra_is_named(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = RUNNER.invoke(app, ["simulate", str(trace), "--chunks", "4", "--plot", "plot.svg"])
    assert result.exit_code == 2
    assert "pip install 'vllm-kvstore[plot]'" in result.stderr


def test_a_picture_is_drawn(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: the extra `plot`")
    picture = tmp_path / "plot.svg"
    result = RUNNER.invoke(app, ["simulate", str(trace), "--chunks", "4,12", "--plot", str(picture)])
    assert result.exit_code == 0
    assert b"<svg" in picture.read_bytes()
    result = RUNNER.invoke(app, ["simulate", str(trace), "--chunks", "4", "--plot", str(tmp_path / "plot.what")])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("sizes", "labels"),
    [
        ([20, 50, 100, 200, 400], ["20", "50", "100", "200", "400"]),
        ([1, 4, 12, 1_000_000, 1_200_000], ["1", "4", "12", "1,000,000"]),
        ([0.25, 0.5, 1000.4], ["0.25", "0.5", "1,000"]),
        ([8], ["8"]),
    ],
)
def test_ticks_do_not_collide(sizes: list[float], labels: list[str]) -> None:
    places, found = _ticks(sizes)
    assert found == labels
    assert set(places) <= set(sizes)


def test_a_picture_has_a_panel_a_trace_and_one_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: the extra `plot`")
    drawn: list[Any] = []
    monkeypatch.setattr(report, "save_figure", lambda figure, _file: drawn.append(figure))
    found = [Cell(trace, policy, 8, 4, 0.5) for trace in ("a/t", "b/t", "c/u") for policy in ("LRU", "best possible")]
    report.plot(found, Scale(None), tmp_path)
    (figure,) = drawn
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in shown] == ["a/t", "b/t", "u"]
    assert {axes.get_xlabel() for axes in shown} == {"chunks of memory; disk of 4 chunks below"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["LRU", "best possible"]


def test_the_best_possible_is_no_less_than_any_choice() -> None:
    chains = [[b"a", b"b"], [b"a", b"c"], [b"d", b"e"], [b"a", b"b"], [b"a", b"c"], [b"d", b"e"]]
    sizes = [[1, 1]] * len(chains)
    assert [best_hits(chains, sizes, capacity) for capacity in (0, 1, 2, 3, 4, 5)] == [0, 3, 4, 5, 6, 7]
    for name in POLICIES:
        store = SimulatedStore([open_policy(name, 3)])
        for chain in chains:
            store.request(chain, [1, 1])
        assert store.hit_chunks <= 5
