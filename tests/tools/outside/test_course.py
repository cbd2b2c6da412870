"""The course of ``make bench-outside`` over engines that are made up, and its report."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.tools.outside import __main__ as command
from kvstore.tools.outside import report, run
from kvstore.tools.outside.engines import AGAIN, ENGINES, KVSTORE, PLAIN, Counts, OutsideVllm
from kvstore.tools.outside.generator import Numbers, Place, SkippedError
from kvstore.tools.outside.origin import origin
from kvstore.tools.outside.page import page_of
from kvstore.tools.outside.report import failures_of, headline, outputs_of, rows_of
from kvstore.tools.outside.run import GENERATORS, OUTPUTS, Comparison, Run, compare, read_runs

PREFIX, TRACE, PRESSURE, AIPERF, LMBENCHMARK = (one.name for one in GENERATORS)
SPEEDS = {PLAIN: (0.8, 1.6), AGAIN: (0.4, 1.6), KVSTORE: (0.05, 0.4)}
TOKEN_BYTES = 8192
MACHINE = {"processor": "fast & cheap, 2 cores", "load": "load 0.1 at the beginning"}


class FakeGenerator:
    """Writes its figures as a program would, and fails on wanted engines."""

    about = "made up"

    def __init__(self, name: str, *, skipped: str = "", fails_on: Sequence[str] = ()) -> None:
        self.name, self.skipped, self.fails_on = name, skipped, fails_on

    def prepare(self, place: Place) -> None:
        if self.skipped:
            raise SkippedError(self.skipped)

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        ending = "sys.exit('Boom')" if url in self.fails_on else ""
        code = f"import sys; open({str(out / 'n')!r}, 'a').write({url!r}); {ending}"
        return [sys.executable, "-c", code]

    def variables(self, place: Place) -> Mapping[str, str]:
        return {"LANG": "C"}

    def read(self, out: Path) -> Numbers:
        engine = (out / "n").read_text()  # twice its name, if an earlier result was still there
        return Numbers(*SPEEDS[engine], 2.0 / SPEEDS[engine][0], 10, 0)


class FakeVllm:
    """Engine whose URL is its name."""

    started: ClassVar[list[str]] = []
    wrong: bool = False

    def __init__(self, engine: str, model: Path, folder: Path) -> None:
        self.engine, self.url, self.log = engine, engine, folder / "log"
        self._tokens = 0

    def __enter__(self) -> Self:
        self.started.append(self.engine)
        return self

    def __exit__(self, *_: object) -> None: ...

    def forget(self) -> None:
        self._tokens += 7  # counted before the load begins, so not the load's

    def counts(self) -> Counts:
        self._tokens += 100
        loaded = 9 * self._tokens // 10 if self.engine == KVSTORE else 0
        return Counts(self._tokens, self._tokens // 10, loaded, loaded * TOKEN_BYTES)

    def sample_outputs(self) -> list[str]:
        return ["a", "b", "a", "c" if self.engine == KVSTORE and self.wrong else "b"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(run, "OutsideVllm", FakeVllm)
    monkeypatch.setattr(FakeVllm, "started", [])
    monkeypatch.setattr(run, "build_llama", lambda *_: None)
    monkeypatch.setattr(run, "origin", lambda: "this code")
    use(monkeypatch, FakeGenerator(PREFIX), FakeGenerator(TRACE))
    return Place(tmp_path, tmp_path / "model")


def use(monkeypatch: pytest.MonkeyPatch, *generators: FakeGenerator) -> None:
    monkeypatch.setattr(run, "GENERATORS", generators)
    monkeypatch.setattr(report, "GENERATORS", generators)


def go(place: Place, *names: str, rounds: int = 2, limit_s: float = 600.0) -> Comparison:
    return compare(place, names or (PREFIX, TRACE), rounds, limit_s, lambda _: None)


def test_engines_run_one_after_the_other_in_alternating_order(place: Place) -> None:
    comparison = go(place)
    assert FakeVllm.started == [*ENGINES, *ENGINES[::-1]]
    assert len(comparison.runs) == 2 * 3 * 3
    assert comparison.runs == read_runs(place.runs / "runs.jsonl")


def test_finished_runs_are_not_repeated(place: Place) -> None:
    go(place, PREFIX, rounds=1)
    FakeVllm.started.clear()
    comparison = go(place)
    assert FakeVllm.started == [*ENGINES, *ENGINES[::-1]]
    done = [(one.load, one.engine, one.round) for one in comparison.runs]
    assert len(done) == len({*done}) == 18
    FakeVllm.started.clear()
    assert go(place).runs == comparison.runs
    assert not FakeVllm.started


def test_no_run_begins_after_the_time(place: Place) -> None:
    assert not go(place, limit_s=0).runs
    assert not FakeVllm.started


def test_a_generator_that_cannot_run_is_left_out_with_its_reason(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeGenerator(PREFIX), FakeGenerator(TRACE, skipped="no such trace"))
    comparison = go(place)
    assert comparison.skipped == {TRACE: "no such trace"}
    assert {one.load for one in rows_of(comparison)} == {PREFIX}
    assert "no such trace" in page_of(comparison, MACHINE, "make", "")


def test_a_generator_that_fails_is_shown_and_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeGenerator(PREFIX, fails_on=[KVSTORE]), FakeGenerator(TRACE))
    comparison = go(place, rounds=1)
    (failure,) = failures_of(comparison)
    assert failure == f"{PREFIX} on {KVSTORE}: exit status 1: Boom"
    assert {one.engine for one in rows_of(comparison) if one.load == PREFIX} == {PLAIN, AGAIN}
    use(monkeypatch, FakeGenerator(PREFIX), FakeGenerator(TRACE))
    assert not failures_of(go(place, rounds=1))
    assert FakeVllm.started == [*ENGINES, KVSTORE]


def test_a_generator_that_hangs_ends_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_TIMEOUT_S", 2.0)
    code = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
child.wait()
"""
    error = run._execute([sys.executable, "-c", code, str(tmp_path / "pid")], {**os.environ}, tmp_path / "log")
    assert "timed out" in error
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1000):
        if not alive(pid):
            break
        time.sleep(0.01)
    assert not alive(pid)


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    assert "No such file" in run._execute(["/nonexistent/x"], {}, tmp_path / "log")


@pytest.mark.parametrize("line", ["no json", "{}", "[]", '{"load": 1}'])
def test_a_file_of_runs_that_is_none(line: str, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="is not a file of runs"):
        read_runs(tmp_path / "runs.jsonl")


def test_ratios_are_to_plain_vllm_in_the_same_round(place: Place) -> None:
    def one(engine: str, number: int, ttft_s: float, requests_per_s: float, own: int, loaded: int) -> Run:
        figures = Numbers(ttft_s, 2 * ttft_s, requests_per_s, 10, number)
        return Run(PREFIX, engine, number, Counts(1000, own, loaded, loaded * TOKEN_BYTES), figures)

    runs = [one(PLAIN, 0, 1.0, 1.0, 200, 0), one(PLAIN, 1, 4.0, 0.5, 200, 0)]
    runs += [one(AGAIN, 0, 1.0, 1.0, 200, 0), one(AGAIN, 1, 2.0, 0.5, 200, 0)]
    runs += [one(KVSTORE, 0, 0.1, 5.0, 100, 820), one(KVSTORE, 1, 0.2, 5.0, 120, 800)]
    plain, again, ours = rows_of(Comparison(2, runs))
    assert (plain.times_p50, again.times_p50, ours.times_p50) == (1.0, 1.5, 15.0)
    assert (ours.times_p99, ours.times_faster) == (15.0, 7.5)
    assert (ours.own_hits, ours.loaded, ours.requests, ours.failed) == (0.11, 0.81, 20, 1)
    expected = "TTFT p50 15.0 times lower, p99 15.0, at 92% hits (plain vLLM against itself 1.50)"
    assert headline([plain, again, ours]) == expected
    assert f"{PREFIX} on {KVSTORE}: 1 requests failed" in failures_of(Comparison(2, runs))
    alone = rows_of(Comparison(1, runs[4:]))[0]
    assert (alone.times_p50, headline([alone])) == (None, "")


def test_outputs_are_compared_with_the_first_ones_of_plain_vllm(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outputs_of(go(place, rounds=1)).different == 0
    (place.runs / "runs.jsonl").unlink()
    monkeypatch.setattr(FakeVllm, "wrong", True)
    comparison = go(place, rounds=1)
    found = outputs_of(comparison)
    assert (found.compared, found.different) == (12, 1)
    assert failures_of(comparison) == ["outputs: 1 of 12 differ from plain vLLM's"]


def test_outputs_without_a_hit_show_nothing(place: Place) -> None:
    comparison = go(place, rounds=1)
    assert not failures_of(comparison)
    comparison.runs[:] = [
        replace(one, counts=one.counts._replace(loaded_tokens=0)) if one.load == OUTPUTS else one
        for one in comparison.runs
    ]
    assert failures_of(comparison) == ["outputs: kvstore loaded nothing, so they show nothing"]


@pytest.mark.parametrize("load", [OUTPUTS, TRACE])
def test_hits_without_their_bytes_are_a_failure(place: Place, load: str) -> None:
    comparison = go(place, rounds=1)
    comparison.runs[:] = [
        replace(one, counts=one.counts._replace(loaded_bytes=one.counts.loaded_bytes // 2)) if one.load == load else one
        for one in comparison.runs
    ]
    (failure,) = failures_of(comparison)
    assert failure.startswith(f"{load} on {KVSTORE}: vLLM counted 90 tokens as hits, and only 368,640 bytes")


def test_runs_of_other_code_are_not_taken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    go(place, PREFIX, rounds=1)
    monkeypatch.setattr(run, "origin", lambda: "that code")
    with pytest.raises(ConfigError, match="has runs of this code, not of that code: forget them by --again"):
        go(place)


def test_the_origin_names_code_and_machine() -> None:
    pytest.importorskip("vllm")
    told = origin()
    assert told == origin()
    assert told.startswith(f"kvstore {__version__} (")
    assert f"{os.cpu_count()} cores" in told


@pytest.fixture
def main(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(command, "GENERATORS", run.GENERATORS)
    monkeypatch.setattr(command, "require_vllm", lambda: None)

    def call(*arguments: str) -> tuple[int, str]:
        status = command.main(["--folder", str(place.folder), *arguments])
        return status, capsys.readouterr().out

    return call


def test_the_command_prints_and_writes_a_report(main: Any, place: Place) -> None:
    status, out = main("--rounds", "1", "--json")
    tree = json.loads(out)
    assert status == 0
    assert [row["engine"] for row in tree["rows"]] == [*ENGINES, *ENGINES]
    assert tree["headline"].startswith("TTFT p50 16.0 times lower, p99 4.0, at 100% hits")
    assert json.loads((place.runs / "report.json").read_text())["rows"] == tree["rows"]
    page = (place.runs / "report.html").read_text()
    assert "16.00" in page
    assert "Content-Security-Policy" in page
    assert "<script" not in page
    assert "16.00" in main("--rounds", "1")[1]


def test_only_takes_beginnings_of_names_and_again_forgets(main: Any) -> None:
    assert [row["load"] for row in json.loads(main("--only", PREFIX, "--rounds", "1", "--json")[1])["rows"]] == [
        PREFIX
    ] * 3
    FakeVllm.started.clear()
    main("--only", "vllm-bench", "--again", "--rounds", "1")
    assert FakeVllm.started == [*ENGINES]
    with pytest.raises(SystemExit):
        main("--only", "nothing-of-this-name")


def test_the_exit_status(main: Any, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    monkeypatch.setattr(FakeVllm, "wrong", True)
    assert main("--rounds", "1")[0] == 1
    (place.runs / "runs.jsonl").write_text("no json\n")
    assert main("--rounds", "1")[0] == 2


def test_a_run_that_is_interrupted_keeps_what_is_finished(
    main: Any, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(vllm: FakeVllm) -> list[str]:
        if vllm.engine == KVSTORE:
            signal.raise_signal(signal.SIGTERM)
        return ["a", "b", "a", "b"]

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(FakeVllm, "sample_outputs", sample)
    assert main("--rounds", "1")[0] == 130
    assert {one.engine for one in read_runs(place.runs / "runs.jsonl")} == {PLAIN, AGAIN}
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_engine_has_its_flags_and_no_settings_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CHUNK_SIZE", "7")
    monkeypatch.setattr("kvstore.tools.outside.engines.find_vllm", lambda: Path("vllm"))
    plain, again, ours = (OutsideVllm(engine, tmp_path, tmp_path) for engine in ENGINES)
    assert [word for word in plain.command() if word not in again.command()] == [str(plain.port)]
    assert "--kv-transfer-config" not in plain.command()
    assert "--kv-transfer-config" in ours.command()
    assert "KVSTORE_CHUNK_SIZE" not in ours.variables()
    assert len({one.log for one in (plain, again, ours)}) == 3
