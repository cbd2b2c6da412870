"""Threads that ARCHITECTURE.md names are those that the code starts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvstore", "adapters", "config", "tools")
LEFT_OUT = ("kvstore/testing/", "tools/bench/", "tools/dev/")  # threads of tests and measurements
POSITION = {"Thread": 2, "ThreadPoolExecutor": 1}  # of the name among the arguments
KEYWORDS = ("name", "thread_name_prefix")
Places = dict[str, list[str]]


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module once, as some folders are also reached by links."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if path.resolve() == path and not name.startswith(LEFT_OUT):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def pattern(name: ast.expr | None) -> str:
    """Return a name as written, with * for variable parts; empty if it is not written here."""
    if isinstance(name, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)
    return str(name.value) if isinstance(name, ast.Constant) else ""


def name_of(call: ast.Call) -> ast.expr | None:
    """Return the expression that names a thread, or a pool of them; None without a name."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    at = POSITION[callee(call)]
    return next((given[word] for word in KEYWORDS if word in given), call.args[at] if len(call.args) > at else None)


def started() -> Places:
    """Return the threads that the code starts, each with its places in the code; under "" those without a name.

    A class, or a function, may get the name from its callers, whose calls are then searched.
    """
    found: Places = {}
    modules = list(sources())
    named_by_callers = set()
    for module, tree in modules:
        for definition in tree.body:
            for node in ast.walk(definition):
                if not isinstance(node, ast.Call) or callee(node) not in POSITION:
                    continue
                name = name_of(node)
                if isinstance(name, ast.Name) and isinstance(definition, ast.ClassDef | ast.FunctionDef):
                    named_by_callers.add(definition.name)
                else:
                    found.setdefault(pattern(name), []).append(f"{module}:{node.lineno}")
    for module, tree in modules:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in named_by_callers:
                names = [pattern(part) for part in [*node.args, *(keyword.value for keyword in node.keywords)]]
                ours = next((name for name in names if name.startswith("kvstore-")), "")
                found.setdefault(ours, []).append(f"{module}:{node.lineno}")
    return found


def told() -> set[str]:
    """Return the threads of the chapter, with * for variable parts."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    chapter = text.partition("\n## Threads\n")[2].partition("\n## ")[0]
    names = re.findall(r"`(kvstore-[^`]+)`", chapter)
    return {re.sub(r"<[^>]+>|\bN$", "*", name) for name in names}


def test_every_thread_is_told() -> None:
    threads = started()
    assert len(threads) > 15
    assert [places for name, places in threads.items() if not name.startswith("kvstore-")] == [], "names of ours"
    assert {name: places for name, places in threads.items() if name not in told()} == {}


def test_every_thread_that_is_told_is_there() -> None:
    assert told() - started().keys() == set()
