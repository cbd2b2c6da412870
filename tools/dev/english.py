"""A lint for English, part of ``make check``: first words of docstrings, and punctuation of the documentation.

A docstring begins with a verb or a noun, so that a reader learns from its first word what is done or what something is.
A line of prose has one colon and one semicolon at most, besides the colon behind the term that a list's item explains.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_FOLDERS: Final = ("kvstore", "adapters", "config", "tools", "tests")
_FIRST_WORDS: Final = {"what", "whatever", "whether", "how", "which", "where", "who", "whoever", "whose", "when", "why"}
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FENCED: Final = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)
_TERM: Final = re.compile(r"\s*[-*] [^:;]*:")
_NOT_PROSE: Final = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")
_OTHER_LINES: Final = ("|", "#", "<!--", "![")


def docstring_problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint for each docstring, also of an attribute, that begins with a question word."""
    for node in ast.walk(ast.parse(source)):
        for line, text in _docstrings(node):
            first = re.split(r"\W+", text.strip(" \n["), maxsplit=1)[0]
            if first.lower() in _FIRST_WORDS:
                yield line, f"a docstring begins with {first!r}: begin with a verb or a noun"


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that stands alone in a body: its docstring, and those below attributes."""
    for statement in node.body if isinstance(node, _DOCUMENTED) else ():
        match statement:
            case ast.Expr(ast.Constant(str(text))):
                yield statement.lineno, text


def prose_problems(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint for each line of Markdown, outside of code and tables, with too much punctuation."""
    without_code = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), page)
    for number, line in enumerate(without_code.splitlines(), 1):
        if line.lstrip().startswith(_OTHER_LINES):
            continue
        prose = _TERM.sub("", _NOT_PROSE.sub("", line), count=1)
        for mark, name in ((":", "colons"), (";", "semicolons")):
            if prose.count(mark) > 1:
                yield number, f"{prose.count(mark)} {name} in a line: write shorter sentences"


def problems(root: Path) -> Iterator[str]:
    """Yield a line for each problem below a checkout."""
    sources = [path for folder in _FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    for path in sources:
        for number, complaint in docstring_problems(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}:{number}: {complaint}"
    pages = [
        *sorted(root.glob("*.md")),
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "deploy").rglob("*.md")),
    ]
    for path in pages:
        for number, complaint in prose_problems(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(root)}:{number}: {complaint}"


def main() -> int:
    """Print the problems of this checkout; returns 1 if there are any."""
    found = list(problems(_ROOT))
    print(*found, sep="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
