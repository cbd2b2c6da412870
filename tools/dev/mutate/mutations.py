"""List of mutations: one YAML file per area, each a list of small defects and the tests that should fail."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Text = Annotated[str, Field(min_length=1)]


class ListError(Exception):
    """The list of mutations is invalid."""


class Mutation(BaseModel):
    """Mutation of the source, which is one small defect.

    Attributes:
        name: the defect in a few words; when the list is read, the file's stem is prepended.
        file: path of the file, relative to the root of the tree.
        before: text that the file contains exactly once.
        after: replacement of the text.
        tests: files or node ids of pytest, the smallest selection that should fail; they run one by one until one does.
        may_break: True if a module that can no longer be imported counts as noticed; nobody would write such a defect.
    """

    may_break: ClassVar = False

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text
    file: Text
    before: Text
    after: str
    tests: Annotated[tuple[Text, ...], Field(min_length=1)]

    def line_in(self, text: str) -> int | None:
        """Return the line of a file's text where ``before`` begins; None unless the text contains it exactly once."""
        return text[: text.index(self.before)].count("\n") + 1 if text.count(self.before) == 1 else None


_LIST = TypeAdapter(list[Mutation])


def read_mutations(folder: Path, pattern: str = "*") -> list[Mutation]:
    """Return the mutations of all areas whose name or file matches a glob pattern.

    Raises:
        ListError: a file of the list is malformed, or two mutations have one name.
    """
    found: dict[str, Mutation] = {}
    for path in sorted(folder.glob("*.yaml")):
        for mutation in _read_area(path):
            if mutation.name in found:
                raise ListError(f"two mutations are called {mutation.name!r}: rename one")
            found[mutation.name] = mutation
    return [m for m in found.values() if fnmatchcase(m.name, pattern) or fnmatchcase(m.file, pattern)]


def _read_area(path: Path) -> list[Mutation]:
    try:
        listed = _LIST.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ListError(f"{path}: {error}") from error
    for mutation in listed:
        if mutation.before == mutation.after:
            raise ListError(f"{path}: {mutation.name!r} changes nothing")
    return [mutation.model_copy(update={"name": f"{path.stem}/{mutation.name}"}) for mutation in listed]
