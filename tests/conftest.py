"""Options of the whole suite, and the order of its files."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.gate import Gate

TESTS = Path(__file__).parent

# Long files go to the workers first, so that no file ends long after the others: folders by the time of their files,
# and before them the longest files of all.
FOLDERS = ("e2e", "conformance", "tools", "faults", "unit", "adapters", "packaging")
LONGEST = (
    *("test_outputs", "test_probe", "test_ranks", "test_faults", "test_peers", "test_mixed", "test_hybrid"),
    *("test_server", "test_redis", "test_striped", "test_wrappers", "test_policies", "test_nixl", "test_disk"),
    *("test_bench", "test_clients", "test_way", "test_firsts", "test_redis_faults", "test_disk_faults"),
    *("test_kernels", "test_group_model", "test_adapter_model", "test_device_order", "test_layouts"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweeps", action="store_true", help="also run the tests marked sweep: every mode, every model")
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak, which take minutes")
    parser.addoption("--quick", action="store_true", help="leave out the tests marked slow, and most random schedules")


def pytest_configure(config: pytest.Config) -> None:
    # Files share the processors, so two threads of torch would mostly wait for each other. OpenMP reads this when torch
    # is imported, here and in the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("numprocesses", None):
        return  # this process hands files out and runs none, so it needs neither hypothesis nor torch
    from support.schedules import begin

    begin(is_soak=config.getoption("--soak"), is_quick=config.getoption("--quick"))
    gc.disable()  # imports make no garbage


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.schedules import join_soak

    for item in items:
        join_soak(item)
    if hasattr(config, "workerinput"):  # thousands of reports of what is skipped take ten seconds
        items[:] = [item for item in items if not _needed_option(item)]
    for item in items:
        if option := _needed_option(item):
            item.add_marker(pytest.mark.skip(reason=f"needs {option}"))
        if item.get_closest_marker("slow") and config.getoption("--quick"):
            item.add_marker(pytest.mark.skip(reason="not with --quick"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_turn)


@pytest.fixture(scope="session", autouse=True)
def _installed_once() -> Iterator[None]:
    """Read the entry points once, because reading them for each engine took a sixth of the unit tests."""
    from kvstore import tiers

    read, path = cache(lambda group: entry_points(group=group)), list(sys.path)

    def remembered(*, group: str) -> EntryPoints:
        return read(group) if sys.path == path else entry_points(group=group)  # a test has installed something

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "entry_points", remembered)
        yield


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Yield a gate, which is open at the end: the interpreter waits for the threads that wait there."""
    from support.gate import Gate

    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture(autouse=True)
def _log_of_one_test(request: pytest.FixtureRequest) -> None:
    """Undo what an engine of an earlier file did to our log, which it joined to vLLM's: tests read the log."""
    if request.node.get_closest_marker("e2e") is None:
        ours = logging.getLogger("kvstore")
        ours.handlers.clear()
        ours.propagate = True
        ours.setLevel(logging.NOTSET)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of a server's log with an error that names it."""
    report = yield
    log = getattr(call.excinfo.value, "log", None) if call.excinfo is not None else None
    if isinstance(log, Path) and log.is_file():
        report.sections.append((f"End of {log.name}", log.read_text(encoding="utf-8", errors="replace")[-4000:]))
    return report


def pytest_collection_finish() -> None:
    # pytest adds handlers to each logger that does not propagate, six times a test, and torch has made forty of them.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.freeze()  # modules and tests stay to the end, so collections need not look at them
    gc.set_threshold(10_000)  # nor so often: garbage of one test is soon reused by the next
    gc.enable()


def _needed_option(item: pytest.Item) -> str:
    """Return the option that a test needs and this run does not have; empty if there is none."""
    has = item.config.getoption
    if item.get_closest_marker("soak"):
        return "" if has("--soak") else "--soak"
    is_left_out = item.get_closest_marker("sweep") and not (has("--soak") or has("--sweeps"))
    return "--sweeps" if is_left_out else ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _turn(item: pytest.Item) -> tuple[int, int]:
    """Return the place of a test's file in the order of files; tests of a file stay in order."""
    folder, name = item.path.relative_to(TESTS).parts[0], item.path.stem
    return _place(folder, FOLDERS), _place(name, LONGEST)


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)
