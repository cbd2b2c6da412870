"""Ctrl-C: the work under way is finished, finished work stays, and a second one ends the command at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
from support.diskwork import flip_payload, make_ref, path_of
from support.forked import ForkedProcess, forker
from support.interrupted import GATE

from kvstore.format.pack import PARTIAL_SUFFIX
from kvstore.tools.interrupts import INTERRUPTED, interruptible
from kvstore.tools.pack import Source, Target, export, import_pack

Fill = Callable[..., Path]
REFS = [make_ref(number) for number in range(5)]
TIMEOUT_S = 120
AGAIN = "; Ctrl-C again ends now\n"
ONLY_MEMORY = [
    "--no-disk",
    "--no-start",
    "--no-redis",
    "--no-mooncake",
    "--no-objects",
    "--no-server",
    "--no-vllm",
    "--no-gpu",
]
BENCH = ["bench", "--geometry", "toy", "--batch-mib", "1", "--rounds", "7", *ONLY_MEMORY]


class Command:
    """A running command."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process

    def reach_gate(self) -> None:
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            if line == f"{GATE}\n":
                return
            lines.append(line)
        pytest.fail("".join(lines))

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> str:
        """Send a signal, and return the line that answers it."""
        assert self._process.stderr is not None
        self._process.send_signal(number)
        return str(self._process.stderr.readline())

    def end(self) -> tuple[int, str, str]:
        """Let the command continue to its end. Returns exit code, output and errors."""
        stdout, stderr = self._process.communicate("go", timeout=TIMEOUT_S)
        return self._process.wait(), stdout, stderr

    def end_now(self) -> tuple[int, str, str]:
        """Interrupt for the second time. Returns exit code, output and errors."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(TIMEOUT_S)
        stdout, stderr = self._process.communicate()
        return code, stdout, stderr


@contextmanager
def started(*arguments: object) -> Iterator[Command]:
    """Yield a command at the gate."""
    words = ["support.interrupted", *map(str, arguments)]
    with forker().start(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            command = Command(process)
            command.reach_gate()
            yield command
        finally:
            process.kill()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a file of three batches of one prompt each."""
    lines = [[number] * 1999 for number in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "p.jsonl"


def test_warm(prompts: Path) -> None:
    with started("warm", "--model", "m", "--prompts", prompts, "--json") as command:
        assert command.interrupt() == f"interrupted: finishing the batch under way; what is stored stays{AGAIN}"
        code, stdout, stderr = command.end()
    assert (code, stderr) == (INTERRUPTED, "interrupted: start it again to go on\n")
    report = json.loads(stdout)
    assert (report["prompts"], report["interrupted"]) == (2, True)


def test_warm_before_it_has_begun(prompts: Path) -> None:
    """While vLLM starts there is nothing to finish."""
    with started("warm", "--model", "late", "--prompts", prompts) as command:
        assert command.interrupt() == "interrupted: nothing was done yet\n"
        assert command.end() == (INTERRUPTED, "", "")


def test_verify(fill: Fill) -> None:
    """Damage found so far is reported."""
    folder = fill(REFS)
    flip_payload(path_of(folder, REFS[0]))
    with started("verify", folder) as command:
        line = command.interrupt()
        code, stdout, stderr = command.end()
    assert line == f"interrupted: finishing the chunk under way, then telling what was found{AGAIN}"
    assert (code, stderr) == (INTERRUPTED, "interrupted: 3 chunks were not read\n")
    assert "checksum does not match" in stdout
    assert "2 chunks, 132.0 KiB sound, 1 damaged" in stdout


def test_pack_export(fill: Fill, tmp_path: Path) -> None:
    """The next export continues, also after a second Ctrl-C."""
    folder, pack = fill(REFS), tmp_path / "a.kvpack"
    with started("pack", "export", "--folder", folder, "-o", pack) as command:
        assert command.interrupt() == f"interrupted: finishing the chunk under way; what was moved stays{AGAIN}"
        code, stdout, stderr = command.end()
    assert (code, stderr) == (INTERRUPTED, "interrupted: start it again to go on\n")
    assert f"{pack}: 2 chunks exported" in stdout
    assert not pack.exists()
    assert pack.with_name(pack.name + PARTIAL_SUFFIX).exists()
    with started("pack", "export", "--folder", folder, "-o", pack) as command:
        command.interrupt()
        code, stdout, _ = command.end_now()
    assert (code, stdout, pack.exists()) == (INTERRUPTED, "", False)
    report = export(Source(folder), pack)
    assert (report.chunks, report.present, report.is_complete) == (2, 3, True)


def test_pack_import(fill: Fill, tmp_path: Path) -> None:
    export(Source(fill(REFS)), tmp_path / "a.kvpack")
    target = tmp_path / "target"
    with started("pack", "import", tmp_path / "a.kvpack", "--folder", target) as command:
        assert command.interrupt(signal.SIGTERM).startswith("interrupted: finishing the chunk under way")
        code, stdout, _ = command.end()
    assert code == INTERRUPTED
    assert "2 chunks imported" in stdout
    report = import_pack(tmp_path / "a.kvpack", Target((target,)))
    assert (report.chunks, report.present, report.is_complete) == (3, 2, True)


def test_bench() -> None:
    """Earlier measurements are shown; the one under way is not, but everything that it opened is closed."""
    with started(*BENCH, "--json") as command:
        line = command.interrupt()
        command.reach_gate()
        code, stdout, _ = command.end()
    assert line == f"interrupted: ending the measurement under way, then showing what was measured before{AGAIN}"
    assert code == INTERRUPTED
    report = json.loads(stdout)
    assert report["lines"][0]["name"] == "CPU store"
    assert "lookup: interrupted" in report["skipped"]
    assert report["interrupted"]
    assert report["codecs"] == []


@pytest.mark.parametrize("arguments", [BENCH, ["verify", "{folder}"]], ids=["bench", "verify"])
def test_the_second_one_ends_it_now(arguments: list[str], fill: Fill) -> None:
    folder = fill(REFS)
    with started(*(argument.format(folder=folder) for argument in arguments)) as command:
        assert command.interrupt().startswith("interrupted: ")
        if arguments is BENCH:  # the first one has left the measurement, and waits at its end
            command.reach_gate()
        assert command.end_now()[:2] == (INTERRUPTED, "")


def test_signals_mean_after_the_run_what_they_meant_before() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with interruptible("finishing"):
        assert all(signal.getsignal(number) is not handler for number, handler in zip(numbers, before, strict=True))
    assert [signal.getsignal(number) for number in numbers] == before
