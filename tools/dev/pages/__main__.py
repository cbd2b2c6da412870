"""Does what the pages show work? Runs every command, configuration and program of every page, in the order of pages.

Each page begins in an empty folder. What stands in for what this machine lacks, and what is not run, is in the log,
with its reason. Exits with 1 if anything failed.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvstore.tools.dev.arguments import parser_of
from kvstore.tools.dev.pages.blocks import blocks, pages
from kvstore.tools.dev.pages.running import PageRun, Result
from kvstore.tools.dev.pages.stand_ins import STAND_INS

EXAMPLE: Final = """examples:
  make pages                                       every page, real vLLM included
  make pages ARGS="--fast commands.md sizing.md"   two of them, and nothing that needs vLLM
"""
_SAID_LINES: Final = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages, and print the result of each block."""
    parser = parser_of("pages", __doc__, EXAMPLE)
    parser.add_argument("page", nargs="*", help="names of pages; all if there are none")
    parser.add_argument("--fast", action="store_true", help="leave out what needs vLLM")
    parser.add_argument("--log", type=Path, help="file for all that was run, and what it printed")
    given = parser.parse_args(arguments)
    chosen = [page for page in pages() if not given.page or page.name in given.page]
    results = []
    for result in run(chosen, with_vllm=not given.fast):
        results.append(result)
        print(f"{result.verdict:8}{result.place:28}{_first_line(result.text)}", flush=True)
        if result.verdict == "failed":
            print(result.remark, flush=True)
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if given.log:
        given.log.parent.mkdir(parents=True, exist_ok=True)
        given.log.write_text(render(results), encoding="utf-8")
    return 1 if counts["failed"] else 0


def run(chosen: Sequence[Path], *, with_vllm: bool) -> Iterator[Result]:
    """Run pages in order, each in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="pages-") as top:
        for page in chosen:
            folder = Path(top, page.stem)
            folder.mkdir()
            with PageRun(folder, with_vllm=with_vllm) as running:
                for block in blocks(page):
                    yield from running.run(block)


def render(results: Sequence[Result]) -> str:
    """Return the log: the replacements, then all results in order, then counts."""
    lines = ["Stood in:", *(f"  {item.pattern}  ->  {item.replacement}  ({item.why})" for item in STAND_INS), ""]
    for result in results:
        lines += [f"{result.place}  {result.verdict}  {result.seconds:.1f} s", _indented(result.text)]
        if result.run_as:
            lines += ["  run as:", _indented(result.run_as)]
        if result.remark:
            lines.append(_indented(result.remark, "    | "))
        lines.append("")
    counts = Counter(result.verdict for result in results)
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), ""])


def _indented(text: str, margin: str = "    ") -> str:
    lines = text.rstrip("\n").splitlines()
    shown = lines if len(lines) <= _SAID_LINES else [*lines[: _SAID_LINES // 2], "...", *lines[-_SAID_LINES // 2 :]]
    return "\n".join(margin + line for line in shown)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")[:100]


if __name__ == "__main__":
    sys.exit(main())
