"""Mutations that operators make, over a toy source tree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvstore.tools.dev.mutate import made
from kvstore.tools.dev.mutate.__main__ import ROOT, main
from kvstore.tools.dev.mutate.made import MadeMutation, make_mutations
from kvstore.tools.dev.mutate.report import diffs, faults, rooms, summary
from kvstore.tools.dev.mutate.running import Result, Verdict

SOURCE = '''"""Toy."""

import logging

LIMIT = 7
logger = logging.getLogger(__name__)


class Toy:
    """It counts."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __repr__(self) -> str:
        return f"Toy({len(self.seen) + 1})"

    def add(self, number: int, *, twice: bool = False) -> int:
        if number > LIMIT and not twice:
            logger.warning("%d is large", number + 1)
            return min(number, LIMIT)
        self.seen.append(number)
        return number


def added(number: int) -> int:
    return Toy().add(number, twice=True)
'''
TESTS = """from toy import Toy, added

def test_add():
    toy = Toy()
    assert [toy.add(3), toy.add(8), added(9)] == [3, 7, 9]
    assert toy.seen == [3]
"""
CONFTEST = "def pytest_addoption(parser):\n    parser.addoption('--quick', action='store_true')\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "toy.py").write_text(SOURCE)
    (root / "test_toy.py").write_text(TESTS)
    (root / "conftest.py").write_text(CONFTEST)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(made, "ROOMS", {"toy.py": ("test_toy.py",)})
    return root


def lines_of(mutations: list[MadeMutation], line: int) -> set[str]:
    """Return what becomes of a line."""
    changed = (mutation for mutation in mutations if f":{line}." in mutation.name)
    return {one.diff().split("\n+")[-1].strip() if "\n+" in one.diff() else "" for one in changed}


def test_what_is_made(tree: Path) -> None:
    """Also where the library has no operator: conditions, operands, named arguments, statements."""
    mutations = make_mutations(tree, "*", None, 0)
    assert lines_of(mutations, 19) == {
        "if True:",
        "if False:",
        "if number > LIMIT:",
        "if not twice:",
        "if number > LIMIT or not twice:",
        "if number >= LIMIT and not twice:",
        "if number > LIMIT and twice:",
    }
    assert lines_of(mutations, 21) == {"return number", "return LIMIT"}
    assert lines_of(mutations, 22) == {"pass"}
    assert lines_of(mutations, 27) == {"return Toy().add(number, )", "return Toy().add(number, twice=False)"}


def test_what_is_no_defect_is_not_made(tree: Path) -> None:
    changed = {mutation.name.split(":")[1].split(".")[0] for mutation in make_mutations(tree, "*", None, 0)}
    assert not {"1", "5", "6", "10", "13", "16", "20"} & changed, "texts, constants, types, what is logged"


def test_each_can_be_put_in_place(tree: Path) -> None:
    mutations = make_mutations(tree, "*", None, 0)
    assert len({mutation.name for mutation in mutations}) == len(mutations)
    for mutation in mutations:
        assert SOURCE.count(mutation.before) == 1
        compile(SOURCE.replace(mutation.before, mutation.after), "toy.py", "exec")


def test_a_seed_gives_a_sample(tree: Path) -> None:
    first, same = (make_mutations(tree, "*", 3, 5) for _ in range(2))
    assert first == same
    assert len(first) == 3
    assert any(make_mutations(tree, "*", 3, seed) != first for seed in range(5))
    assert not make_mutations(tree, "*", 0, 5)


def test_only_a_file_or_a_line(tree: Path) -> None:
    assert not make_mutations(tree, "index/*", None, 0)
    assert make_mutations(tree, "toy.py", 3, 5) == make_mutations(tree, "tree/*", 3, 5)
    only = make_mutations(tree, "tree/toy.py:21*", 1, 0)
    assert [mutation.name for mutation in only] == ["tree/toy.py:21.0", "tree/toy.py:21.1"], "all of the line"


def test_a_run_tells_the_share_and_what_survived(tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "areas").mkdir()
    options = ["--root", str(tree), "--list", str(tmp_path / "areas"), "--jobs", "2", "--seed", "1", "--only", "toy.py"]
    main([*options, "--every", "--json"])
    found = json.loads(capfd.readouterr().out)
    verdicts = {one["name"].split(":")[1]: one["verdict"] for one in found["mutations"]}
    assert verdicts["22.0"] == "caught", "the statement"
    assert [name for name in verdicts if verdicts[name] == "survived"], "the comparison at its limit, at least"
    assert found["seed"] == 1
    with pytest.raises(SystemExit):
        main([*options, "--sample", "0"])


def results(caught: int, survived: int) -> list[Result]:
    mutation = MadeMutation(name="a/m.py:1.0", file="a/m.py", before="x < 1\n", after="x <= 1\n", tests=("t",))
    return [Result(mutation, 1, Verdict.CAUGHT)] * caught + [Result(mutation, 1, Verdict.SURVIVED)] * survived


def test_survivors_need_no_reason_but_few_may_survive() -> None:
    assert not faults(results(7, 3))
    assert faults(results(6, 4)) == ["6 of 10 made are caught: fewer than 70%"]
    assert list(diffs(results(1, 1))) == ["a/m.py:1.0 in a/m.py survived:\n-x < 1\n+x <= 1"]
    assert list(rooms(results(1, 1))) == ["a: 1 of 2 made mutations are caught"]
    assert summary(results(8, 2)) == "8 of 10 made mutations are caught (80%)"


def test_every_room_has_files_and_tests() -> None:
    for room, tests in made.ROOMS.items():
        assert list(ROOT.glob(room)), room
        assert all((ROOT / test).exists() for test in tests), room
