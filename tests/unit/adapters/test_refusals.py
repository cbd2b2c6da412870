"""Errors at start: each is the last line that the user sees, once, from any process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.adapters.vllm import refusals
from kvstore.adapters.vllm.refusals import VARIABLE, as_lines, note, noted
from kvstore.model.errors import ConfigError, KVStoreError

FIRST = """
    import multiprocessing, sys
    from kvstore.adapters.vllm.refusals import note, print_at_end
    from kvstore.model.errors import TierError

    def child(number):
        note(TierError(f"the folder {number} is in use"))
        raise TierError("seen in a traceback")

    if __name__ == "__main__":
        print_at_end()
        print_at_end()
        from multiprocessing import shared_memory
        left = shared_memory.SharedMemory(create=True, size=64)  # Python says at the end that it is left
        for number in range(CHILDREN):
            process = multiprocessing.get_context(METHOD).Process(target=child, args=(number,))
            process.start()
            process.join()
        sys.stderr.write("vLLM's last words\\n")
        sys.exit(1)
"""


def run(tmp_path: Path, method: str, children: int) -> list[str]:
    """Return the lines of a first process and its children on standard error."""
    text = textwrap.dedent(FIRST).replace("METHOD", repr(method)).replace("CHILDREN", str(children))
    (tmp_path / "vllm").write_text(text)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "vllm")], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_last_line_is_the_error_of_whoever_had_it_first(tmp_path: Path, method: str) -> None:
    lines = run(tmp_path, method, 2)
    assert lines[-1] == "kvstore: error: the folder 0 is in use"
    assert sum(line.startswith("kvstore: error") for line in lines) == 1
    assert any("leaked shared_memory" in line for line in lines), "said before, not behind"


def test_nothing_is_printed_where_nothing_was_refused(tmp_path: Path) -> None:
    assert not [line for line in run(tmp_path, "spawn", 0) if line.startswith("kvstore")]


@pytest.mark.parametrize("path", ["", "/nowhere", "/etc/hostname", "own"])
def test_a_note_touches_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A process id or a descriptor may mean something else by now."""
    other = tmp_path / "other"
    with other.open("wb") as file:
        monkeypatch.setenv(VARIABLE, f"/proc/{os.getpid()}/fd/{file.fileno()}" if path == "own" else path)
        note(KVStoreError("broken"))
    assert other.read_bytes() == b""


def test_only_our_errors_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[KVStoreError] = []
    monkeypatch.setattr(refusals, "note", told.append)

    @noted
    def call(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    assert call(None) == 7
    for error in (ConfigError("ours"), ValueError("another's")):
        with pytest.raises(type(error)):
            call(error)
    assert [str(error) for error in told] == ["ours"]


def test_one_problem_takes_one_line_and_several_one_each() -> None:
    assert as_lines("it cannot be used:\n- a key") == "kvstore: error: it cannot be used: a key"
    assert as_lines("plain") == "kvstore: error: plain"
    several = as_lines("it cannot be used:\n- one\n- two").splitlines()
    assert [line.removeprefix("kvstore: error: ") for line in several] == ["it cannot be used:", "- one", "- two"]


def test_a_kernel_without_files_in_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> int:
        raise OSError("not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.delenv(VARIABLE, raising=False)
    refusals.print_at_end()
    assert VARIABLE not in os.environ
    note(KVStoreError("broken"))


@pytest.mark.parametrize("flags", [None, SimpleNamespace(), SimpleNamespace(EngineArgs=type("EngineArgs", (), {}))])
def test_a_process_that_reads_no_flags_is_left_alone(monkeypatch: pytest.MonkeyPatch, flags: object) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", flags)
    refusals.check_first(lambda _config: None)
    assert not hasattr(getattr(flags, "EngineArgs", None), "create_engine_config")


def test_flags_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    engine_args = type("EngineArgs", (), {"create_engine_config": lambda self: self})
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=engine_args))
    for _ in range(3):
        refusals.check_first(checked.append)
    made = engine_args()
    assert made.create_engine_config() is made
    assert checked == [made]
