"""The threads that ARCHITECTURE.md tells of are those that the code starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvstore", "adapters", "config", "tools")
LEFT_OUT = ("kvstore/testing/", "tools/bench/", "tools/dev/")  # threads of tests and measurements
NAME_AT = {
    "Thread": 99,
    "ThreadPoolExecutor": 1,
    "Timer": 99,
    "_start": 0,
}  # the argument that names it, if by position
NAMED = ("name", "thread_name_prefix")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every module once: some folders are reached by links, too."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if path.resolve() == path and not name.startswith(LEFT_OUT):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def named_by(call: ast.Call) -> ast.expr | None:
    """What a thread, or a pool of them, is called."""
    is_method = isinstance(call.func, ast.Attribute)
    callee = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if callee not in NAME_AT or (is_method and callee == "_start"):  # a function of deadline.py's
        return None
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    found = next((given[name] for name in NAMED if name in given), None)
    at = NAME_AT[callee]
    if found is None and len(call.args) > at:
        found = call.args[at]
    return found or ast.Constant("")


def pattern(name: ast.expr) -> str:
    """A name as written, with * for what varies."""
    if isinstance(name, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)
    return str(name.value) if isinstance(name, ast.Constant) else "*"


def started() -> dict[str, list[str]]:
    """The threads that the code starts, each with the places that do."""
    found: dict[str, list[str]] = {}
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (given := named_by(node)) is not None:
                found.setdefault(pattern(given), []).append(f"{name}:{node.lineno}")
    return found


def told() -> set[str]:
    """The threads of the chapter, with * for what varies."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    chapter = text.partition("\n## Threads\n")[2].partition("\n## ")[0]
    names = re.findall(r"`(kvstore-[^`]+)`", chapter)
    return {re.sub(r"<[^>]+>|\bN$", "*", name) for name in names}


def test_every_thread_is_told() -> None:
    threads = started()
    (given,) = threads.pop("*")  # by its callers, which are looked at themselves
    assert given.startswith("kvstore/wrappers/deadline.py:")
    assert len(threads) > 15
    assert [places for name, places in threads.items() if not name.startswith("kvstore-")] == [], "names of ours"
    assert {name: places for name, places in threads.items() if name not in told()} == {}


def test_every_thread_that_is_told_is_there() -> None:
    assert told() - started().keys() == set()
