"""Parser of pages: fenced blocks in order, the commands in them, and the output shown for each command."""

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
    """Fenced block.

    Attributes:
        page: name of the page's file.
        line: line at which its text begins.
        kind: word after the fence, such as ``console``; ``sh`` for a block of commands without a word.
        body: text of the block.
        reason: reason why it is not run, from a comment above it; empty for most.
        given: a new sandbox is made before the block is run.
    """

    page: str
    line: int
    kind: str
    body: str
    reason: str = ""
    given: bool = False


class Command(NamedTuple):
    """Command of a block, on one line or several, and the lines of output shown for it."""

    page: str
    line: int
    text: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Words of the command as the shell splits it, without comments and here-document."""
        own = self.text.partition("\n")[0] if _HERE_DOCUMENT.search(self.text) else self.text
        return shlex.split(own.replace("\\\n", " "), comments=True)


def pages(root: Path = ROOT) -> list[Path]:
    """Return README, then the pages in the order of its guides, then the rest."""
    readme = root / "README.md"
    named = _LINK.findall(readme.read_text(encoding="utf-8").partition("\n## Guides\n")[2])
    order = {name: number for number, name in reversed(list(enumerate(named)))}
    return [readme, *sorted((root / "docs").glob("*.md"), key=lambda page: (order.get(page.name, len(named)), page))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield all fenced blocks of a page, in order."""
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
    """Yield the commands of a terminal or shell block, in order."""
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
    """Tell if the shell would ask for another line."""
    if match := _HERE_DOCUMENT.search(text):
        return match[1] not in text.splitlines()[1:]
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation is open, or the last character is a backslash
        return True
    return text.endswith("\\")
