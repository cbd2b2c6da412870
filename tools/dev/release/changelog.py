"""A check of CHANGELOG.md: the format of Keep a Changelog, and a section for the version that is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from typing import Final

from packaging.version import InvalidVersion, Version

UNRELEASED: Final = "Unreleased"
_KINDS: Final = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
_SECTION: Final = re.compile(r"^## (.*)$", re.MULTILINE)
_TITLE: Final = re.compile(r"\[([^\]]+)\](?: - (\S+))?(?: \[YANKED\])?")
_KIND: Final = re.compile(r"^### (.*)$", re.MULTILINE)


def changelog_problems(text: str, version: str, *, is_release: bool) -> Iterator[str]:
    """Yield a line for each problem.

    Args:
        text: of the changelog.
        version: the version that is built.
        is_release: its commit has the version's tag, so [Unreleased] is not enough.
    """
    sections = _sections(text)
    known: list[Version] = []
    for title, body in sections:
        named = _TITLE.fullmatch(title)
        if named is None:
            yield f"'## {title}' is no section: write '## [1.2.3] - 2026-01-31' or '## [{UNRELEASED}]'"
            continue
        yield from _kind_problems(title, body)
        if named[1] != UNRELEASED:
            yield from _release_problems(title, named[1], named[2], known)
        elif known:
            yield f"'## {title}' comes first, before released versions"
    yield from _missing(sections, known, version, is_release=is_release)


def _sections(text: str) -> list[tuple[str, str]]:
    """Return title and body of each section."""
    parts = _SECTION.split(text)[1:]
    return list(zip(map(str.strip, parts[::2]), parts[1::2], strict=True))


def _kind_problems(title: str, body: str) -> Iterator[str]:
    kinds = _KIND.findall(body)
    for kind in kinds:
        if kind not in _KINDS:
            yield f"'### {kind}' in '## {title}' is not one of {', '.join(_KINDS)}"
        elif kinds.count(kind) > 1:
            yield f"'### {kind}' is in '## {title}' more than once: join them"


def _release_problems(title: str, name: str, day: str | None, known: list[Version]) -> Iterator[str]:
    """Check a released version, and append it to the known ones, which descend."""
    try:
        version = Version(name)
    except InvalidVersion:
        yield f"'## {title}' names no version: write '## [1.2.3] - 2026-01-31'"
        return
    if known and version >= known[-1]:
        yield f"'## {title}' comes after {known[-1]}: newer versions come first, each once"
    known.append(version)
    try:
        date.fromisoformat(day or "")
    except ValueError:
        yield f"'## {title}' has no date: write '## [{name}] - 2026-01-31'"


def _missing(sections: list[tuple[str, str]], known: list[Version], version: str, *, is_release: bool) -> Iterator[str]:
    built = Version(version)
    if built in known:
        return
    if is_release:
        yield f"there is no '## [{version}]', and the commit has its tag: give it what is in [{UNRELEASED}]"
    elif known and built < max(known):
        yield f"there is no '## [{version}]', and {max(known)} is newer: raise the version"
    elif not dict(sections).get(f"[{UNRELEASED}]", "").strip():
        yield f"there is neither '## [{version}]' nor anything in '## [{UNRELEASED}]': say there what changed"
