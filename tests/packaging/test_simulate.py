"""``kvstore simulate``: its counts, its output, and its errors."""

from __future__ import annotations

import json
import random
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.policies import POLICIES, open_policy
from kvstore.policies.recorder import TraceRecorder
from kvstore.policies.simulation import SimulatedStore, best_hits
from kvstore.tools.cli import app
from kvstore.tools.simulate import report
from kvstore.tools.simulate.cells import Cell, Scale
from kvstore.tools.simulate.report import _ticks

RUNNER = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of three chains of four blocks in turn, the last block of each half full."""
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


@pytest.fixture
def parting(tmp_path: Path) -> Path:
    """Return a trace whose ids stand for 16 tokens; most requests part from others inside a chunk of four."""
    chooser, chains = random.Random(7), [list(range(6))]
    for number in range(60):
        before = chooser.choice(chains)
        own = range(100 * (number + 1), 100 * (number + 1) + chooser.randint(0, 9))
        chains.append([*before[: chooser.randint(1, len(before))], *own])
    tokens = [16 * len(chain) - chooser.choice((0, 0, 5)) for chain in chains]
    lines = [
        {"timestamp": 0, "input_length": count, "hash_ids": chain} for count, chain in zip(tokens, chains, strict=True)
    ]
    path = tmp_path / "parting.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


BLOCKS_OF_16 = ["--block-tokens", "16", "--chunk-tokens", "64", "--policy", "LRU"]


def test_by_blocks_the_longest_common_prefix_is_found(parting: Path) -> None:
    whole, blocks = cells(str(parting), *BLOCKS_OF_16, "--chunks", "1000")
    lines = [json.loads(line) for line in parting.read_text(encoding="utf-8").splitlines()]
    found, known = 0, set()
    for line in lines:
        prefixes = [tuple(line["hash_ids"][: end + 1]) for end in range(len(line["hash_ids"]))]
        found += min(16 * sum(prefix in known for prefix in prefixes), line["input_length"])
        known.update(prefixes)
    assert blocks["matching"] == "blocks"
    assert blocks["hit_tokens"] == blocks["tiers"][0]["hit_tokens"] == found
    assert blocks["used_tokens"] == whole["used_tokens"] == sum(line["input_length"] for line in lines)
    assert blocks["hit_rate"] == pytest.approx(found / blocks["used_tokens"])
    assert (whole["matching"], whole["policy"]) == ("chunks", "LRU")
    assert 0 < whole["hit_tokens"] < found


def test_blocks_have_sizes_in_bytes_and_a_disk(parting: Path) -> None:
    mib = 1 << 20
    arguments = ["--bytes-per-token", str(mib // 64), "--size", str(5 / 1024), "--disk", "1"]
    _, blocks = cells(str(parting), *BLOCKS_OF_16, *arguments)
    memory, disk = blocks["tiers"]
    assert memory["evicted_chunks"] > 0, "five slots"
    assert disk["evicted_chunks"] == 0
    assert min(memory["hit_tokens"], disk["hit_tokens"]) > 0
    assert memory["hit_tokens"] + disk["hit_tokens"] == blocks["hit_tokens"]
    assert blocks["hit_bytes"] == blocks["hit_tokens"] * mib // 64


def test_the_table_says_what_blocks_bring(parting: Path) -> None:
    result = RUNNER.invoke(app, ["simulate", str(parting), *BLOCKS_OF_16])
    assert result.exit_code == 0, result.output
    assert "LRU, whole chunks and tails" in result.stdout
    assert "Tokens found of those asked, by size." in result.stdout
    assert re.search(
        r"LRU: blocks instead of whole chunks and tails: .* \+\d+\.\d points with \d+ chunks\n", result.stdout
    )
    tree = json.loads(RUNNER.invoke(app, ["simulate", str(parting), *BLOCKS_OF_16, "--json"]).stdout)
    assert (tree["block_tokens"], tree["chunk_tokens"]) == (16, 64)


def test_a_trace_of_our_own_says_what_its_keys_stand_for(tmp_path: Path) -> None:
    with closing(TraceRecorder(tmp_path / "own", 256)) as recorder:
        recorder.record([bytes([number]) for number in range(5)], 1100, 40)
        recorder.record([bytes([number]) for number in (0, 1, 2, 7)], 1024, 40)
    command = [
        "simulate",
        str(tmp_path / "own"),
        "--chunk-tokens",
        "1024",
        "--policy",
        "LRU",
        "--chunks",
        "9",
        "--json",
    ]
    result = RUNNER.invoke(app, [*command, "--block-tokens", "128"])
    assert (result.exit_code, "stand for 256 tokens, not for 128" in result.stderr) == (2, True)
    result = RUNNER.invoke(app, [*command, "--block-tokens", "256"])
    assert [cell["hit_tokens"] for cell in json.loads(result.stdout)["cells"]] == [0, 768]


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
        (["--chunk-tokens", "1024"], "--chunk-tokens needs --block-tokens"),
        (["--block-tokens", "512"], "a chunk of 256 tokens is not two or more such blocks: use --chunk-tokens 4096"),
        (["--block-tokens", "512", "--chunk-tokens", "512"], "a chunk of 512 tokens is not two or more"),
        (["--block-tokens", "500", "--chunk-tokens", "1024"], "a chunk of 1024 tokens is not two or more"),
        (["--block-tokens", "16"], "line 1 is not a request of a trace (1,792 tokens have 4 keys"),
        (
            ["--block-tokens", "512", "--chunk-tokens", "1024", "--size", "0.001", "--bytes-per-token", "131072"],
            "--size 0.001 does not hold a chunk of 134,217,728 bytes",
        ),
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
    assert "notes.txt, line 1 is not a request of a trace" in result.stderr


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
