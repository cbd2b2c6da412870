"""Truth of CONTRIBUTING.md: its paths exist, and it names the parts of each addition."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.testing import PolicyConformance, TierConformance

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "ARCHITECTURE.md"]
PATH = re.compile(r"`((?:kvstore|adapters|config|tools|tests|docs|deploy)/[\w/.*-]*)`")
MAX_LINES = 450


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    named = PATH.findall(page.read_text(encoding="utf-8"))
    assert len(named) > 10
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_suites_that_it_names_are_there() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    for suite in (TierConformance, PolicyConformance):
        assert f"`{suite.__module__.rpartition('.')[0]}.{suite.__name__}`" in text


def test_the_architecture_is_short() -> None:
    assert len(PAGES[1].read_text(encoding="utf-8").splitlines()) <= 250


def modules() -> list[Path]:
    folders = ("kvstore", "adapters", "config", "tools", "tests")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_module_is_too_long() -> None:
    long = {path.relative_to(ROOT): path.read_text(encoding="utf-8").count("\n") for path in modules()}
    assert not {str(path): lines for path, lines in long.items() if lines > MAX_LINES}
