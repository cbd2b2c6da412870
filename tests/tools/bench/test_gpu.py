"""The bench of a GPU, on a CPU: every figure has its limit, wrong bytes and stuck steps are reported."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.late_device import LateDevice, LateStreams, late_paged

from kvstore.paged import binding
from kvstore.paged.base import PagedKV
from kvstore.paged.device import DevicePagedKV
from kvstore.tools.bench.geometry import GEOMETRIES
from kvstore.tools.bench.gpu import __main__ as cli
from kvstore.tools.bench.gpu import run
from kvstore.tools.bench.gpu.__main__ import main
from kvstore.tools.bench.gpu.bed import Scale, make_scale
from kvstore.tools.bench.gpu.figures import Ended, Figure, figure_table
from kvstore.tools.bench.gpu.moves import ONE_WAY_GOALS, measure_moves
from kvstore.tools.bench.gpu.order import BLOCK_TOKENS, BLOCKS, CHUNK_BLOCKS, Ground, check_broken_order, check_order
from kvstore.tools.bench.gpu.run import RESULTS, run_steps
from kvstore.tools.bench.gpu.steps import GPU_TESTS, PLANS, STEPS, VISIT_S, Step
from kvstore.tools.bench.gpu.traffic import check_stress, measure_beside
from kvstore.tools.bench.samples import BenchError
from kvstore.tools.bench.workbench import one_torch_thread
from kvstore.transfer.mover import LoadJob, LoadResult, Mover

ROOT = Path(__file__).resolve().parents[3]
SMALL = make_scale(torch.device("cpu"), small=True)
QWEN = GEOMETRIES["qwen-0.5b"]
MEASURED = [step for step in STEPS.values() if step.measure is not None and step.why_not(SMALL) is None]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread of torch, as a step's own process does."""
    with one_torch_thread():
        yield


@pytest.fixture(params=["device", "host"])
def paths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the code for a GPU on a CPU, or the code for a CPU."""
    if request.param == "device":
        monkeypatch.setattr(binding, "HostPagedKV", DevicePagedKV)
    return str(request.param)


@pytest.mark.parametrize("step", MEASURED, ids=lambda step: step.name)
def test_every_figure_has_its_limit(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "HostPagedKV", DevicePagedKV)
    assert step.measure is not None
    figures = list(step.measure(replace(SMALL, folder=tmp_path)))
    assert figures
    assert len({figure.figure for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.limit > 0
        assert figure.value >= 0
        assert math.isfinite(figure.ratio)
        assert Figure.from_json(json.loads(json.dumps(figure.to_json()))) == figure


def test_every_path_of_a_geometry_is_measured(paths: str) -> None:
    found = {figure.figure.removeprefix("qwen-0.5b: "): figure for figure in measure_moves(QWEN, SMALL)}
    ways = ["out", "in", "out by layer", "in by layer", "both at once"]
    times = [f"a chunk {way}, {what}" for way in ("out", "in") for what in ("host issue", "wall")]
    assert list(found) == [*ways, *times]
    assert [found[way].goal for way in ways] == [0.70, 0.70, None, None, 0.85]
    assert all(len(found[way].more["samples_s"]) == SMALL.rounds for way in ways)  # type: ignore[arg-type]
    for way in ("out", "in"):
        assert found[f"a chunk {way}, host issue"].value < found[f"a chunk {way}, wall"].value


def test_the_goals_are_those_of_the_project() -> None:
    assert {name: ONE_WAY_GOALS[name] for name in GEOMETRIES} == {
        "llama-8b": 0.90,
        "llama-70b-tp8": 0.85,
        "qwen-0.5b": 0.70,
        "deepseek-mla": 0.85,
    }


def test_a_step_of_the_model_is_timed_in_four_modes() -> None:
    found = {figure.figure: figure for figure in measure_beside(QWEN, SMALL)}
    goals = {name: figure.goal for name, figure in found.items() if figure.goal is not None}
    assert goals == {"qwen-0.5b: step with saves, p99": 1.05}
    assert found["qwen-0.5b: step with saves, p99"].at_most
    for mode in ("alone", "with saves", "with loads", "with both"):
        assert len(found[f"qwen-0.5b: step {mode}, p50"].more["samples_s"]) == SMALL.model_steps  # type: ignore[arg-type]


# Wrong bytes


def flip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every load change a bit of its first block."""
    load = Mover.load

    def wrong(mover: Mover, jobs: list[LoadJob]) -> LoadResult:
        result = load(mover, jobs)
        mover.paged._runs[0].rows[0][jobs[0].block_ids[0]] ^= 1  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr(Mover, "load", wrong)


@pytest.mark.parametrize("measure", [measure_moves, measure_beside, check_stress])
def test_a_changed_byte_ends_a_step(measure: object, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(monkeypatch)
    assert callable(measure)
    with pytest.raises(BenchError, match=r"are not those stored|were wrong"):
        list(measure(QWEN, SMALL))


class LateGround(Ground):
    """The cache for the check of order, on a device that works late."""

    def __init__(self, scale: Scale) -> None:
        self.late = LateDevice(7, eagerness=0.05)
        super().__init__(scale)

    def bind(self, caches: Mapping[str, torch.Tensor]) -> PagedKV:
        tokens = CHUNK_BLOCKS * BLOCK_TOKENS
        return late_paged(self.late, caches, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, chunk_tokens=tokens)

    def write(self, where: torch.Tensor, value: int) -> None:
        self.late.current.launch(lambda: Ground.write(self, where, value))

    def read(self, where: torch.Tensor) -> torch.Tensor:
        edges = torch.zeros(2 * len(self.caches), dtype=torch.uint8)
        self.late.current.launch(lambda: edges.copy_(Ground.read(self, where)))
        return edges

    def wait(self) -> None:
        self.late.run_all()


def test_the_order_holds_on_a_device_that_works_late() -> None:
    assert [figure.ratio for figure in check_order(SMALL, LateGround)] == [1.0, 1.0]


def test_an_order_without_waits_is_noticed() -> None:
    assert [figure.value > 0 for figure in check_broken_order(SMALL, LateGround, LateStreams)] == [True, True]
    assert [figure.ratio for figure in check_order(SMALL, LateGround)] == [1.0, 1.0]  # the waits are back


def test_a_check_that_notices_nothing_fails() -> None:
    with pytest.raises(BenchError, match="nothing is shown"):
        list(check_broken_order(SMALL, Ground, LateStreams))  # nothing is late here


# Steps


def python(name: str, program: str, limit_s: float = 60.0, *, is_question: bool = False) -> Step:
    return Step(name, limit_s, program=lambda _: [sys.executable, "-c", program], is_question=is_question)


def test_one_step_does_not_end_the_others(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    begin = f"import fcntl, os, time; lock = open({str(held)!r}); fcntl.flock(lock, fcntl.LOCK_EX); "
    hangs = begin + "os.fork(); time.sleep(600)"
    listed = [
        python("raises", "raise ValueError('a reason')"),
        python("hangs", hangs, 1.0),
        python("asks", "import os; os.abort()", is_question=True),
        python("works", "print('3 passed')"),
        Step("absent", 1.0, program=lambda _: ["no-such-program"], needs="no-such-program"),
    ]
    ended = {step.name: step for step in run_steps(listed, replace(SMALL, folder=tmp_path))}
    assert {name: step.outcome for name, step in ended.items()} == {
        "raises": "failed",
        "hangs": "timed out",
        "asks": "answered",
        "works": "done",
        "absent": "skipped",
    }
    assert [name for name, step in ended.items() if step.is_failed] == ["raises", "hangs"]
    assert "ValueError: a reason" in ended["raises"].said
    assert ended["works"].said == "3 passed"
    assert ended["absent"].said == "no-such-program is not on the PATH"
    with held.open() as lock:  # no process that it had started holds it
        fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_step_that_cannot_be_ended_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step waits in a driver for a device that hangs."""
    kill, spared = os.killpg, list[int]()
    monkeypatch.setattr(os, "killpg", lambda group, _: spared.append(group))
    monkeypatch.setattr(run, "END_WAIT_S", 0.1)
    listed = [python("hangs", "import time; time.sleep(20)", 2.0), python("works", "")]
    try:
        hung, worked = run_steps(listed, replace(SMALL, folder=tmp_path))
    finally:
        kill(spared[0], signal.SIGKILL)
        os.waitpid(spared[0], 0)
    assert (hung.outcome, worked.outcome) == ("timed out", "done")
    assert "it cannot be ended" in hung.said
    assert [line["outcome"] for line in lines(tmp_path) if "outcome" in line] == ["timed out", "done"]


def test_results_are_written_before_the_next_step(tmp_path: Path) -> None:
    running = run_steps([python("one", "print(1)"), python("two", "print(2)")], replace(SMALL, folder=tmp_path))
    next(running)
    assert [line.get("step") for line in lines(tmp_path)] == [None, "one"]
    next(running)
    assert [line.get("step") for line in lines(tmp_path)] == [None, "one", "two"]
    assert lines(tmp_path)[0]["run"]["device"] == "CPU"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RESULTS).read_text(encoding="utf-8").splitlines()]


def test_figures_of_a_step_that_fails_later_are_kept(tmp_path: Path) -> None:
    figure = Figure("half", 1.0, 2.0, 0.5, "GB/s", goal=0.9)
    text = json.dumps({"step": "breaks", **figure.to_json()})
    program = f"open({str(tmp_path / RESULTS)!r}, 'a').write({text + chr(10)!r}); raise SystemExit(3)"
    (ended,) = run_steps([python("breaks", program)], replace(SMALL, folder=tmp_path))
    assert ended.is_failed
    assert ended.figures == [figure]


def test_a_run_in_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--device", "cpu", "--small", "--out", str(tmp_path), "--only"]
    assert main([*command, "moves-qwen*"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"qwen-0.5b: both at once .* 0\.85", shown)
    found = lines(tmp_path)
    assert [line["outcome"] for line in found if "outcome" in line] == ["done"]
    assert {line["figure"] for line in found if "figure" in line} > {"qwen-0.5b: out", "qwen-0.5b: in"}


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(PLANS, "bench", [python("good", "print(1)"), python("bad", "raise SystemExit(1)")])
    command = ["bench", "--device", "cpu", "--small", "--out", str(tmp_path), "--only"]
    assert main([*command, "good"]) == 0
    assert main([*command, "*"]) == 1
    assert main([*command, "neither,b?d"]) == 1
    assert main([*command, "neither"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err
    assert main(["one", "no-such-step", "--device", "cpu"]) == 1
    assert main(["one", "tests", "--device", "cpu"]) == 1
    assert "it is a program" in capsys.readouterr().err


def test_what_is_missing_is_named_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in {"pydantic", "yaml"} else object())
    assert main(["visit", "--device", "cpu", "--small"]) == 2
    said = capsys.readouterr().err
    assert "lacks pydantic, pyyaml" in said
    assert re.search(r"pip install --target packages .* pydantic pyyaml", said)


# Plans


def test_a_visit_fits_into_its_time() -> None:
    assert sum(step.limit_s for step in PLANS["visit"]) <= VISIT_S
    assert all(step.limit_s <= 600 for plan in PLANS.values() for step in plan)


def test_steps_have_names_of_their_own() -> None:
    for plan in PLANS.values():
        assert len({step.name for step in plan}) == len(plan)
    assert {step.name for step in PLANS["bench"]} > {
        f"{kind}-{name}" for kind in ("moves", "beside") for name in GEOMETRIES
    }


def test_a_visit_needs_no_vllm() -> None:
    assert "offloading" not in {step.name for step in PLANS["visit"]}
    assert STEPS["offloading"].hindrance(SMALL) in {"vLLM is not installed", "vLLM's copies need a GPU"}


def test_all_tests_of_the_gpu_are_run() -> None:
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")}
    marked -= {Path(__file__), ROOT / "tests/tools/bench/test_bench.py"}  # the tests of the visit itself
    run = [ROOT / name for name in GPU_TESTS]
    assert not [path for path in marked if not any(path.is_relative_to(folder) for folder in run)]
    assert all(folder.exists() for folder in run)


def test_checkers_and_profilers_run_a_step_that_there_is(tmp_path: Path) -> None:
    for name in ("memcheck", "racecheck", "ncu"):
        program = STEPS[name].program
        assert program is not None
        command = program(tmp_path)
        assert command[0] == STEPS[name].needs
        begin = command.index("one")
        assert STEPS[command[begin + 1]].measure is not None
        assert "--small" in command[begin:]


def rows(ended: list[Ended]) -> Iterator[tuple[str, ...]]:
    table = figure_table(ended, "title")
    return zip(*(list(column.cells) for column in table.columns), strict=True)


def test_the_table() -> None:
    fast, slow = Figure("fast", 9.0, 10.0, 0.9, "GB/s", 0.9), Figure("slow", 2.0, 1.0, 2.0, "ms", 1.05, at_most=True)
    ended = [Ended("moves", "done", figures=[fast, slow]), Ended("order", "timed out", "ended after its 60 s")]
    shown = list(rows(ended))
    assert shown[0] == ("moves", "fast", "10.00 GB/s", "9.00 GB/s", "0.90", "0.90", "[green]ok[/]")
    assert shown[1] == ("moves", "slow", "1.00 ms", "2.00 ms", "2.00", "<= 1.05", "[yellow]short[/]")
    assert shown[2] == ("order", "ended after its 60 s", "", "", "", "", "[red]failed[/]")
    assert not ended[0].is_failed
