"""What a page shows: fenced blocks in order, the commands in them, and what is said to be printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[3]
COMMANDS: Final = ("console", "sh", "bash")
_NOT_RUN: Final = re.compile(r"<!-- not run: (.+) -->")
_GIVEN: Final = "<!-- given: sandbox -->"
_LINK: Final = re.compile(r"\]\((?:docs/)?([\w-]+\.md)")
_COMMAND: Final = re.compile(r"(kvstore|curl|pip|make|vllm|redis-server|[A-Z_]+=\S+ vllm) ")
_HERE_DOCUMENT: Final = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: name of the page's file.
        line: where its text begins.
        kind: what stands behind the fence, such as ``console``; ``sh`` if that is nothing, and commands are shown.
        body: its text.
        reason: why nobody runs it, from a comment above it; empty for most.
        given: the script lays the sandbox before it.
    """

    page: str
    line: int
    kind: str
    body: str
    reason: str = ""
    given: bool = False


class Command(NamedTuple):
    """A command of a block, in one line or several, and the lines that it is said to print."""

    page: str
    line: int
    text: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """As the shell divides it, without comments, and without a document that stands below it."""
        own = self.text.partition("\n")[0] if _HERE_DOCUMENT.search(self.text) else self.text
        return shlex.split(own.replace("\\\n", " "), comments=True)


def pages(root: Path = ROOT) -> list[Path]:
    """README, then the pages in the order of its guides, then the rest."""
    readme = root / "README.md"
    named = _LINK.findall(readme.read_text(encoding="utf-8").partition("\n## Guides\n")[2])
    order = {name: number for number, name in reversed(list(enumerate(named)))}
    return [readme, *sorted((root / "docs").glob("*.md"), key=lambda page: (order.get(page.name, len(named)), page))]


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    reason, given = "", False
    for number, line in lines:
        if line.startswith("```"):
            body = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                body.append(f"{inner}\n")
            kind = line[3:].strip() or ("sh" if any(map(_COMMAND.match, body)) else "")
            yield Block(page.name, number + 1, kind, "".join(body), reason, given)
            reason, given = "", False
        elif match := _NOT_RUN.fullmatch(line):
            reason = match[1]
        elif line == _GIVEN:
            given = True
        elif line.strip() and not line.startswith("<!--"):
            reason = ""  # the comment stands above something else


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block of a terminal or a shell, in order."""
    prompt = "$ " if block.kind == "console" else ""
    lines = iter(enumerate(block.body.splitlines(), block.line))
    found: Command | None = None
    for number, line in lines:
        if line.startswith(prompt) and (prompt or (line.strip() and not line.startswith("#"))):
            if found:
                yield found
            text = line.removeprefix(prompt)
            while _goes_on(text):
                _, more = next(lines)
                text += "\n" + more
            found = Command(block.page, number, text)
        elif found and prompt:
            found = found._replace(output=(*found.output, line))
    if found:
        yield found


def _goes_on(text: str) -> bool:
    """Whether the shell would ask for another line."""
    if match := _HERE_DOCUMENT.search(text):
        return match[1] not in text.splitlines()[1:]
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation is open, or the last character is a backslash
        return True
    return text.endswith("\\")
