"""Truth of README, docs and CHANGELOG: links have targets, and statements about messages and vLLM are right."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from kvstore.tools.bench.servers import MALLOC_CONF, MALLOC_NAMES
from kvstore.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
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


MAX_WORDS = 27_000
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [title for title in re.findall(r"^### (.*)$", TROUBLES, re.MULTILINE) if not title.startswith("No message")]


@cache
def texts() -> frozenset[str]:
    """Return all texts in the code; a zero byte stands for each inserted value."""
    folders = ("kvstore", "adapters", "config", "tools")
    trees = (ast.parse(path.read_text(encoding="utf-8")) for top in folders for path in (ROOT / top).rglob("*.py"))
    return frozenset(filter(None, (text(node) for tree in trees for node in ast.walk(tree))))


def text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return None


@pytest.mark.parametrize("title", MESSAGES)
def test_troubles_have_the_message_as_heading(title: str) -> None:
    """The heading matches one text of the code word by word; ``...`` stands for inserted values."""
    pattern = re.compile(".*".join(map(re.escape, title.split("..."))), re.DOTALL)
    assert any(map(pattern.search, texts()))


def test_there_are_twenty_troubles() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES) >= 20


def test_the_documentation_is_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MAX_WORDS


def test_the_comparison_is_of_what_is_installed() -> None:
    """It names the tiers and policies of vLLM's OffloadingConnector, whose disk tier has no bound and no checksums."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(found.origin).parent / "v1" / "kv_offload"
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Comparison")[2].partition("\n## ")[0]
    (version,) = re.findall(r"vLLM (\d+\.\d+)\.\d+ with the tiers", section)
    if f'"{version}.' not in Path(found.origin).with_name("_version.py").read_text(encoding="utf-8").replace("'", '"'):
        pytest.skip(f"another version than the {version} of the comparison")
    factory = (folder / "tiering" / "factory.py").read_text(encoding="utf-8")
    tiers = set(re.findall(r'register_tier\(\s*"(\w+)"', factory)) - {"example"}
    assert tiers == set(re.findall(r"`(\w+)`", section.partition(")")[0]))
    policies = (folder / "cpu" / "policies" / "factory.py").read_text(encoding="utf-8")
    assert re.findall(r'register_cache_policy\(\s*"(\w+)"', policies) == ["lru", "arc"]
    disk = "\n".join(path.read_text(encoding="utf-8") for path in (folder / "tiering" / "fs").glob("*.py"))
    assert not re.search(r"\bmax_(size|bytes)|capacity|evict|checksum|\bcrc", disk)
