"""Collection of a configuration's problems and warnings, so that a user sees all of them at once."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic_core import ErrorDetails

from kvstore.config.nearest import nearest_key
from kvstore.config.reference import KEYS

_SHOWN_CHARACTERS: Final = 80
_MAY_NAME_SALTS: Final = frozenset({"local_cpu_quotas", "local_disk_quotas"})  # by mistake, in plain text
_SECRET_NAME: Final = re.compile(r"pass|secret|token|credential|auth|api_?key|access_?key", re.IGNORECASE)
_USERINFO: Final = re.compile(r"(\w+://)?\S+@")
_WRONG_TYPE: Final = re.compile(r"_type$|_parsing|^int_from_float$")
_NUMBER_WITH_UNIT: Final = re.compile(r"\s*[\d.]+\s*[a-z]+\s*", re.IGNORECASE)
_DEMANDS: Final = {
    "true or false": "true or false",
    "whole number": "a whole number",
    "number": "a number",
    "text": "text: write it in quotes",
}


class Entry(NamedTuple):
    """A key with its value, and the place where the user set it."""

    key: str
    value: object
    where: str


@dataclass
class Findings:
    """Problems prevent the start; warnings do not. Each is one line."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def sorted_problems(self) -> list[str]:
        """Return the problems grouped by source; those of a file in the order of its lines."""
        return sorted(self.problems, key=_natural_order)

    def unknown_key(self, entry: Entry) -> None:
        """Add a key unknown to both kvstore and LMCache."""
        self.problems.append(f"{_named(entry)}: unknown key; {_suggestion(entry.key)}")

    def invalid(self, entry: Entry, error: ErrorDetails) -> None:
        """Add a value that the schema refuses."""
        self.problems.append(f"{_named(entry)}: {_demand(entry, error)}")

    def no_mapping(self, entry: Entry) -> None:
        """Add an ``extra_config`` that is not a mapping."""
        self.problems.append(f"{_named(entry)}: must be a mapping of keys to values")


def _suggestion(key: str) -> str:
    nearest = nearest_key(key)
    return f"did you mean {nearest}?" if nearest else f"valid keys are {', '.join(KEYS)}"


def _named(entry: Entry) -> str:
    return f"{entry.where}: {one_line(entry.key)}: {_shown(entry)}"


def _shown(entry: Entry) -> str:
    """Return the value as the user wrote it, shortened, and without anything that may be a secret."""
    value = entry.value
    is_count = entry.key.endswith("tokens") and isinstance(value, int)
    is_secret = entry.key not in KEYS and _SECRET_NAME.search(entry.key) and not is_count
    if is_secret or entry.key in _MAY_NAME_SALTS:
        return "(a value that is not shown)"
    if isinstance(value, dict | list | tuple | set):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, str):
        return json.dumps(one_line(_USERINFO.sub(r"\1***@", value)), ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"  # Python refuses to print some of them
    return one_line(str(value))


def one_line(text: str) -> str:
    """Return at most 80 printable characters of a text."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _demand(entry: Entry, error: ErrorDetails) -> str:
    """Return the requirement that the value does not meet."""
    reference = KEYS[entry.key]
    if not _WRONG_TYPE.search(error["type"]):
        return error["msg"].replace("Input should", "must").replace("String should", "must")
    demand = f"must be {_DEMANDS[reference.kind]}"
    if not reference.unit:
        return demand
    example = "" if reference.default == "null" else f", such as {reference.default}"
    without = ""
    if isinstance(entry.value, str):
        without = ", without a unit" if _NUMBER_WITH_UNIT.fullmatch(entry.value) else ", in digits and without quotes"
    return f"{demand} of {reference.unit}{example}{without}"


def _natural_order(line: str) -> list[str | int]:
    """Return a sort key in which line 9 comes before line 10."""
    parts = re.split(r"(\d+)", line)
    return [int(part) if position % 2 else part for position, part in enumerate(parts)]
