"""What README, docs and CHANGELOG point at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from kvstore.tools.bench.redis import MALLOC_CONF, MALLOC_NAMES
from kvstore.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@by_page
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}: no such heading"


@by_page
def test_make_targets_exist(page: Path) -> None:
    code = "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= make_targets()


@by_page
def test_commands_exist(page: Path) -> None:
    code = "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
    commands = getattr(get_command(app), "commands")  # noqa: B009 - the group's type is not exported
    assert set(re.findall(r"(?:^|`|\$ )kvstore ([a-z][a-z-]*)", code, re.MULTILINE)) <= set(commands)


def test_the_bench_measures_the_redis_that_is_recommended() -> None:
    page = (ROOT / "docs" / "redis.md").read_text(encoding="utf-8")
    assert f"\nexport {MALLOC_NAMES[0]}={MALLOC_CONF}\nexport {MALLOC_NAMES[1]}=${MALLOC_NAMES[0]}\n" in page
