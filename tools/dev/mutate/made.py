"""Mutations that operators make in the rooms whose tests are quick. Nobody writes them, so a run tries a sample."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import deep_replace

from kvstore.tools.dev.mutate.mutations import Mutation
from kvstore.tools.dev.mutate.operators import is_left_out, mutants

_SERVER = "clients file_order grants operators pins pool sessions spaces stock"  # modules that decide
_TOOLS = "calc configs flags modelgroups replay vllmflags"

# Files by pattern, and the tests that should notice. What is named like the module runs first.
ROOMS = {
    "adapters/vllm/glue/*.py": ("tests/adapters", "tests/unit/adapters/glue"),
    "adapters/vllm/requests/*.py": ("tests/unit/adapters/requests", "tests/unit/adapters/scheduler"),
    "adapters/vllm/scheduler/*.py": ("tests/unit/adapters/scheduler", "tests/unit/ops/test_admin.py"),
    "adapters/vllm/telemetry/*.py": ("tests/unit/adapters/telemetry",),
    "config/**/*.py": ("tests/unit/config",),
    "kvstore/format/*.py": ("tests/unit/format", "tests/tools/test_pack.py", "tests/conformance/test_pack.py"),
    "kvstore/format/codecs/*.py": ("tests/unit/format",),
    "kvstore/handover/tracker.py": ("tests/unit/handover",),
    "kvstore/index/*.py": ("tests/unit/index",),
    "kvstore/model/*.py": ("tests/unit/model", "tests/unit/paged/test_headed.py"),
    "kvstore/paged/[bcghp]*.py": ("tests/unit/paged",),
    "kvstore/policies/*.py": ("tests/unit/policies", "tests/conformance/test_policies.py"),
    "kvstore/protocol/*.py": ("tests/unit/protocol", "tests/unit/server"),
    **{f"kvstore/server/{name}.py": ("tests/unit/server",) for name in _SERVER.split()},
    "kvstore/tiers/disk/*.py": ("tests/unit/tiers/disk",),
    **{f"tools/{name}.py": (f"tests/tools/test_{name}.py",) for name in _TOOLS.split()},
    "tools/proxy/choice.py": ("tests/tools/proxy/test_choice.py",),
}
MADE_TIMEOUT_S = 60.0  # several times what the tests of a room take; some mutations never end


class MadeMutation(Mutation):
    """Mutation that an operator has made."""

    may_break: ClassVar = True

    def diff(self) -> str:
        """Return the lines that it takes away and adds."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=0, lineterm="")
        return "\n".join(list(lines)[3:])


class _Finder(cst.CSTVisitor):
    """Visitor that finds the mutants of a module, by line: each with the node whose place it takes."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module) -> None:
        self.found: dict[int, list[tuple[cst.CSTNode, cst.CSTNode]]] = {}
        self._constants = {node for node in module.body if isinstance(node, cst.SimpleStatementLine)}

    def on_visit(self, node: cst.CSTNode) -> bool:
        if node in self._constants or is_left_out(node):
            return False
        for mutant in mutants(node):
            line = self.get_metadata(PositionProvider, node).start.line
            self.found.setdefault(line, []).append((node, mutant))
        return True


def make_mutations(root: Path, pattern: str, size: int | None, seed: int) -> list[MadeMutation]:
    """Return a sample of the mutations whose name or file matches a glob pattern.

    Args:
        root: the working tree.
        pattern: pattern of files (``index/leases.py``), or of mutations (``index/leases.py:81*``: all of that line).
        size: number of mutations in all rooms, of which each file has its part by its length; None for all there are.
        seed: seed of the sample; that of a file depends on it and on the file alone.
    """
    rooms = {path: tests for room, tests in ROOMS.items() for path in sorted(root.glob(room))}
    texts = {path: path.read_text(encoding="utf-8") for path in rooms}
    num_lines = sum(text.count("\n") for text in texts.values())
    files, _, place = pattern.partition(":")
    made: list[MadeMutation] = []
    for path, text in texts.items():
        file, short = path.relative_to(root).as_posix(), f"{path.parent.name}/{path.name}"
        if fnmatchcase(file, files) or fnmatchcase(short, files):
            chance = random.Random(f"{seed} {file}")  # noqa: S311 - a sample
            wanted = None if size is None or place else int(size * text.count("\n") / num_lines + chance.random())
            named = f"{rooms[path][0]}/test_{path.stem}.py"
            tests = (named, *rooms[path]) if (root / named).exists() else rooms[path]
            for at, before, after in _changes(text, wanted, chance):
                made.append(MadeMutation(name=f"{short}:{at}", file=file, before=before, after=after, tests=tests))
    return [mutation for mutation in made if not place or fnmatchcase(mutation.name, f"*:{place}")]


def _changes(text: str, wanted: int | None, chance: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield changes of a module, all or as many as are wanted, each of another line: the place, before and after."""
    wrapper = MetadataWrapper(cst.parse_module(text))
    finder = _Finder(wrapper.module)
    wrapper.visit(finder)
    lines = sorted(finder.found)
    for line in lines if wanted is None else sorted(chance.sample(lines, min(wanted, len(lines)))):
        numbers = range(len(finder.found[line]))
        for number in numbers if wanted is None else [chance.choice(numbers)]:
            changed = deep_replace(wrapper.module, *finder.found[line][number])
            assert isinstance(changed, cst.Module)
            yield (f"{line}.{number}", *_difference(text, changed.code))


def _difference(text: str, changed: str) -> tuple[str, str]:
    """Return the lines that differ, with as many before them as make them unique, and what they become."""
    old, new = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    pieces = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    differing = [piece for piece in pieces if piece[0] != "equal"]
    (_, first, _, new_first, _), (_, _, end, _, new_end) = differing[0], differing[-1]
    while text.count("".join(old[first:end])) > 1:
        first, new_first = first - 1, new_first - 1
    return "".join(old[first:end]), "".join(new[new_first:new_end])
