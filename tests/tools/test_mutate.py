"""The runner of mutations, over a toy source tree."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.tools.dev.mutate.__main__ import AREAS, ROOT, main
from kvstore.tools.dev.mutate.mutations import ListError, Mutation, read_mutations
from kvstore.tools.dev.mutate.report import faults, summary
from kvstore.tools.dev.mutate.running import Result, Verdict

SOURCE = """def larger(one, other):
    return one if one > other else other

def unused(one):
    return one + 1

def endless(one):
    return one

def crash(one):
    return one
"""
TESTS = """import os
import time
import toy
from pathlib import Path
from typing import Any

def test_larger():
    assert toy.larger(1, 2) == toy.larger(2, 1) == 2

def test_endless():
    while toy.endless(1) != 1:
        time.sleep(0.01)

def test_crash():
    if toy.crash(1) != 1:
        os.abort()

def test_sound():
    assert Path(toy.__file__).parent == Path(__file__).parent

def test_broken_already():
    assert False
"""
CAUGHT = {"name": "the smaller", "before": "one if one > other", "after": "one if one < other"}
SURVIVOR = {"name": "two more", "before": "one + 1", "after": "one + 2", "tests": ["test_toy.py::test_sound"]}
STALE = {"name": "gone", "before": "two if", "after": "one if"}
TWICE = {"name": "in two places", "before": "one", "after": "two"}
BROKEN = {"name": "no Python", "before": "def larger(one, other):", "after": "def larger(one, other)"}
FAILING = {"name": "fails anyway", "before": "one + 1", "after": "", "tests": ["test_toy.py::test_broken_already"]}
NO_TEST = {"name": "no such test", "before": "one + 1", "after": "", "tests": ["test_toy.py::test_none"]}
ENDLESS = {
    "name": "endless",
    "before": "def endless(one):\n    return one",
    "after": "def endless(one):\n    return 2",
    "tests": ["test_toy.py::test_endless"],
}
CRASH = {
    "name": "crash",
    "before": "def crash(one):\n    return one",
    "after": "def crash(one):\n    return 2",
    "tests": ["test_toy.py::test_crash"],
}

Run = Callable[..., tuple[int, dict[str, dict[str, Any]], dict[str, Any]]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "toy.py").write_text(SOURCE)
    (root / "test_toy.py").write_text(TESTS)
    (root / "link.py").symlink_to("toy.py")
    (root / ".gitignore").write_text("ignored.py\n")
    (root / "ignored.py").write_text("raise SystemExit")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def facts(tree: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in tree.rglob("*")}


@pytest.fixture
def run(tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs mutations of the toy: the exit status, outcomes by name, and all output."""

    def run_(
        *mutations: dict[str, object], options: tuple[str, ...] = ()
    ) -> tuple[int, dict[str, Any], dict[str, Any]]:
        areas = tmp_path / "areas"
        areas.mkdir(exist_ok=True)
        listed = [{"file": "toy.py", "tests": ["test_toy.py::test_larger"], **mutation} for mutation in mutations]
        (areas / "toy.yaml").write_text(yaml.safe_dump(listed))
        before = facts(tree)
        status = main(["--root", str(tree), "--list", str(areas), "--json", "--jobs", "2", *options])
        assert facts(tree) == before, "the tree itself is left alone"
        answer = json.loads(capfd.readouterr().out)
        return status, {found["name"].removeprefix("toy/"): found for found in answer["mutations"]}, answer

    return run_


def test_who_catches_what(run: Run) -> None:
    status, found, answer = run(CAUGHT, SURVIVOR, STALE)
    assert status == 1
    assert (found["the smaller"]["verdict"], found["the smaller"]["by"]) == ("caught", "test_toy.py::test_larger")
    assert found["the smaller"]["line"] == 2
    assert found["two more"]["verdict"] == "survived"
    assert found["gone"]["verdict"] == "stale"
    assert (answer["caught"], answer["total"]) == (1, 3)
    assert len(answer["faults"]) == 2  # the survivor and the stale one


def test_all_caught_is_success(run: Run) -> None:
    status, _, answer = run(CAUGHT)
    assert (status, answer["faults"]) == (0, [])


def test_what_says_nothing_about_the_tests(run: Run) -> None:
    """Each of these would otherwise count as caught, or as a survivor."""
    status, found, _ = run(TWICE, BROKEN, FAILING, NO_TEST)
    assert status == 1
    assert {name: one["verdict"] for name, one in found.items()} == {
        "in two places": "stale",
        "no Python": "broken",
        "fails anyway": "untested",
        "no such test": "untested",
    }


def test_what_hangs_is_caught(run: Run) -> None:
    status, found, _ = run(ENDLESS, options=("--timeout", "3"))
    assert (status, found["endless"]["verdict"]) == (0, "caught (time ran out)")


def test_what_crashes_is_caught(run: Run) -> None:
    status, found, _ = run(CRASH)
    assert (status, found["crash"]["verdict"], found["crash"]["by"]) == (0, "caught", "signal 6")


def test_only_some(run: Run) -> None:
    _, found, _ = run(CAUGHT, STALE, options=("--only", "toy/the *"))
    assert list(found) == ["the smaller"]
    with pytest.raises(SystemExit):
        run(CAUGHT, options=("--only", "nothing"))


def test_none_of_the_list_may_survive() -> None:
    mutation = Mutation(name="m", file="f", before="a", after="b", tests=("t",))
    caught, survived = Result(mutation, 1, Verdict.CAUGHT, "t"), Result(mutation, 1, Verdict.SURVIVED)
    assert not faults([caught] * 19)
    assert faults([*[caught] * 19, survived]) == ["m: survived: "]
    assert summary([*[caught] * 19, survived]) == "19 of 20 listed mutations are caught (95%)"


@pytest.mark.parametrize(
    "text",
    ["- name: [", "- {name: a, file: f, before: x, after: y}", "- {name: a, file: f, before: x, after: x, tests: [t]}"],
    ids=["no YAML", "without tests", "changes nothing"],
)
def test_a_list_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "area.yaml").write_text(text)
    with pytest.raises(ListError):
        read_mutations(tmp_path)


def test_one_name_for_two(tmp_path: Path) -> None:
    one = {"name": "a", "file": "f", "before": "x", "after": "y", "tests": ["t"]}
    (tmp_path / "area.yaml").write_text(yaml.safe_dump([one, one]))
    with pytest.raises(ListError, match="rename one"):
        read_mutations(tmp_path)


def test_none_of_the_list_is_stale() -> None:
    """The author of a changed line sees at once that a mutation refers to it."""
    mutations = read_mutations(AREAS)
    assert len(mutations) >= 80
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in {mutation.file for mutation in mutations}}
    assert not [mutation.name for mutation in mutations if mutation.line_in(texts[mutation.file]) is None]
    tests = {test.split("::")[0] for mutation in mutations for test in mutation.tests}
    assert not [name for name in tests if not (ROOT / name).is_file()]
