"""Run of mutations: first all tests without mutations, then the tests of each mutation, several in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from kvstore.tools.dev.mutate.mutations import Mutation
from kvstore.tools.dev.mutate.tree import PytestRun, Tree, copies

_SOME_FAILED = 1  # exit status of pytest
_NONE_FAILED = 0
_NOT_FOUND = 4


class Verdict(StrEnum):
    """Verdict on a mutation."""

    CAUGHT = "caught"
    HUNG = "caught (time ran out)"
    SURVIVED = "survived"
    STALE = "stale"  # its file does not contain its text exactly once
    BROKEN = "broken"  # tests could not be collected, so the defect would never be committed
    UNTESTED = "untested"  # the tests that it names fail without it, or none of them runs here

    @property
    def is_caught(self) -> bool:
        """True if a test noticed the mutation."""
        return self in {Verdict.CAUGHT, Verdict.HUNG}


class Result(NamedTuple):
    """Mutation, its line, its verdict, and the test that noticed it or the reason why that is unknown."""

    mutation: Mutation
    line: int | None
    verdict: Verdict
    by: str = ""
    seconds: float = 0.0


class Options(NamedTuple):
    """Options of a run: parallel copies, timeouts of one mutation's tests and of all without any, more for pytest."""

    jobs: int
    timeout_s: float = 120.0
    baseline_timeout_s: float = 900.0
    arguments: tuple[str, ...] = ()


Say = Callable[[Result], None]


def run_mutations(root: Path, mutations: Sequence[Mutation], options: Options, say: Say) -> list[Result]:
    """Try every mutation; the results are in the order of the list.

    Args:
        root: the working tree, which is not changed.
        mutations: mutations to try.
        options: options of the run.
        say: called with each result as soon as it is known, from any thread.
    """
    passed: dict[str, bool] = {}
    free: SimpleQueue[Tree] = SimpleQueue()
    mine = threading.local()

    def take_tree() -> None:
        mine.tree = free.get()

    def test_one(mutation: Mutation) -> Result:
        result = _try_one(mine.tree, mutation, passed, options)
        say(result)
        return result

    jobs = min(options.jobs, len(mutations))
    if not jobs:
        return []
    with copies(root, jobs) as trees, ThreadPoolExecutor(jobs, initializer=take_tree) as pool:
        for tree in trees:
            free.put(tree)
        try:
            for runs in pool.map(lambda tests: _unmutated(mine.tree, tests, options), _parts(mutations, jobs)):
                passed |= _passed(runs)
            return list(pool.map(test_one, mutations))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.close()
            raise


def _parts(mutations: Iterable[Mutation], count: int) -> list[list[str]]:
    """Divide all tests that mutations name into ``count`` parts; tests of one file stay together."""
    files: dict[str, dict[str, None]] = {}
    for mutation in mutations:
        for test in mutation.tests:
            files.setdefault(test.split("::")[0], {})[test] = None
    parts: list[list[str]] = [[] for _ in range(count)]
    for tests in sorted(files.values(), key=len, reverse=True):
        min(parts, key=len).extend(tests)
    return [part for part in parts if part]


def _unmutated(tree: Tree, tests: Sequence[str], options: Options) -> list[PytestRun]:
    """Run tests without a mutation; if one does not exist, each runs alone, because pytest would run none."""
    run = tree.test([*options.arguments, *tests], options.baseline_timeout_s)
    if run.status != _NOT_FOUND:
        return [run]
    return [tree.test([*options.arguments, test], options.baseline_timeout_s) for test in tests]


def _passed(runs: Iterable[PytestRun]) -> dict[str, bool]:
    """Return the node ids of all tests that ran without a mutation, and whether they passed."""
    found: dict[str, bool] = {}
    for run in runs:
        found |= dict.fromkeys(run.passed, True) | dict.fromkeys(run.failed, False)
    return found


def _try_one(tree: Tree, mutation: Mutation, passed: dict[str, bool], options: Options) -> Result:
    path = tree.home / mutation.file
    line = mutation.line_in(path.read_text(encoding="utf-8")) if path.is_file() else None
    if line is None:
        return Result(mutation, None, Verdict.STALE, f"its text does not stand in {mutation.file} exactly once")
    for test in mutation.tests:
        ran = [name for name in passed if name == test or name.startswith((f"{test}::", f"{test}[", f"{test}/"))]
        failing = [name for name in ran if not passed[name]]
        if failing or not any(passed[name] for name in ran):
            return Result(mutation, line, Verdict.UNTESTED, f"{(failing or [test])[0]} does not pass without it")
    begin_s = time.monotonic()
    with tree.changed(mutation.file, mutation.before, mutation.after):
        for test in mutation.tests:
            run = tree.test([*options.arguments, test], options.timeout_s, at_first=True)
            if run.status != _NONE_FAILED:
                break
    return Result(mutation, line, *_judge(run, may_break=mutation.may_break), time.monotonic() - begin_s)


def _judge(run: PytestRun, *, may_break: bool) -> tuple[Verdict, str]:
    if run.status is None:
        return Verdict.HUNG, ""
    if run.status == _NONE_FAILED:
        return Verdict.SURVIVED, ""
    if run.status == _SOME_FAILED and run.failed:
        return Verdict.CAUGHT, run.failed[0]
    if run.status < 0:  # a signal: it crashed the process
        return Verdict.CAUGHT, f"signal {-run.status}"
    verdict = Verdict.CAUGHT if may_break else Verdict.BROKEN
    return verdict, next(iter(run.output.strip().splitlines()[-1:]), f"exit status {run.status}")
