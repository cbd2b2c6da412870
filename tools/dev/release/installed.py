"""The packages that kvstore's dependencies and extras bring along, as installed here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME: Final = "vllm-kvstore"
_FOR_DEVELOPERS: Final = frozenset({"dev", "testing"})
_HOSTS: Final = frozenset({"vllm"})  # installed before kvstore, which brings none of what they need


@dataclass
class Package:
    """A package, and the packages that it needs.

    Attributes:
        asked: how it is required, by the extra of kvstore; the empty name stands for no extra.
        facts: its metadata; None if it is not installed.
    """

    name: str
    facts: metadata.PackageMetadata | None
    asked: dict[str, str] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)

    @property
    def version(self) -> str | None:
        """Its version, if it is installed."""
        return self.facts["Version"] if self.facts is not None else None


def declared(root: Path) -> dict[str, list[Requirement]]:
    """Return the requirements in pyproject.toml by extra, but for those of developers."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: texts for name, texts in project["optional-dependencies"].items() if name not in _FOR_DEVELOPERS}
    return {
        name: [Requirement(text) for text in texts] for name, texts in {"": project["dependencies"], **extras}.items()
    }


def packages(requirements: Mapping[str, list[Requirement]]) -> dict[str, Package]:
    """Return the required packages and all that these need, by name."""
    found: dict[str, Package] = {}
    for extra, required in requirements.items():
        for requirement in required:
            name = canonicalize_name(requirement.name)
            if name != NAME and (requirement.marker is None or requirement.marker.evaluate()):
                _add(requirement, found).asked[extra] = str(requirement.specifier)
    return dict(sorted(found.items()))


def _add(requirement: Requirement, found: dict[str, Package]) -> Package:
    """Add a package and what it needs. Asked for with other extras, a known one is walked through again."""
    name = canonicalize_name(requirement.name)
    package = found.setdefault(name, Package(name, None))
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return package
    package.facts = distribution.metadata
    for needed in () if name in _HOSTS else _needed(distribution, requirement.extras):
        other = canonicalize_name(needed.name)
        if other not in package.needs and other != name:
            package.needs.add(other)
            _add(needed, found)
    return package


def _needed(distribution: metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in distribution.requires or ():
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield needed
