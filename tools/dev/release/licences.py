"""The licence of each package, as its metadata tells it, and those that may not be shipped without a reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Final

import yaml
from license_expression import ExpressionError, LicenseExpression, get_spdx_licensing

from kvstore.tools.dev.release.installed import Package

UNKNOWN: Final = "unknown"
_EXCEPTIONS: Final = Path(__file__).with_name("exceptions.yaml")
_PERMISSIVE: Final = frozenset(
    {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "HPND", "ISC", "MIT", "MIT-0", "PSF-2.0"}
    | {"Python-2.0", "Unlicense", "Zlib", "Apache-2.0 WITH LLVM-exception"}
)
_CLASSIFIERS: Final = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}  # without a version or a variant: the usual one
_SPDX: Final = get_spdx_licensing()


@dataclass(frozen=True)
class Licence:
    """Licence of a package as an SPDX expression; ``reason`` if it stands on the list of exceptions."""

    package: str
    version: str | None
    expression: str
    reason: str = ""

    @property
    def problem(self) -> str:
        """Complaint about it; empty for a permissive licence or an exception."""
        if self.reason or is_permissive(self.expression):
            return ""
        return f"{self.package} {self.version or '(not installed)'}: {self.expression}"


def is_permissive(expression: str) -> bool:
    """Tell if an SPDX expression lets anybody ship the package, by one of its alternatives."""
    try:
        parsed = _SPDX.parse(expression, validate=True)
    except ExpressionError:
        return False
    return parsed is not None and _allows(parsed)


def _allows(parsed: LicenseExpression) -> bool:
    if isinstance(parsed, _SPDX.OR):
        return any(map(_allows, parsed.args))
    if isinstance(parsed, _SPDX.AND):
        return all(map(_allows, parsed.args))
    return str(parsed) in _PERMISSIVE


def licences(packages: Iterable[Package]) -> list[Licence]:
    """Return the licence of each package, exceptions applied."""
    exceptions: Mapping[str, Mapping[str, str]] = yaml.safe_load(_EXCEPTIONS.read_text(encoding="utf-8"))
    return [_licence(package, exceptions) for package in packages]


def _licence(package: Package, exceptions: Mapping[str, Mapping[str, str]]) -> Licence:
    told = UNKNOWN if package.facts is None else expression_of(package.facts)
    for pattern, exception in exceptions.items():
        if fnmatchcase(package.name, pattern) and told in {UNKNOWN, exception["licence"]}:
            return Licence(package.name, package.version, exception["licence"], exception["reason"])
    return Licence(package.name, package.version, told)


def expression_of(facts: metadata.PackageMetadata) -> str:
    """Return the SPDX expression that metadata gives: in its own field, in the older one, or by classifiers."""
    for key in ("License-Expression", "License"):
        text = facts[key] if key in facts else ""  # noqa: SIM401 - its type has no get
        if text and _is_spdx(text):
            return text
    names = [line.rpartition(" :: ")[2] for line in facts.get_all("Classifier") or () if line.startswith("License ::")]
    known = [_CLASSIFIERS[name] for name in names if name in _CLASSIFIERS]
    return " AND ".join(sorted(known)) if known and len(known) == len(names) else UNKNOWN


def _is_spdx(text: str) -> bool:
    try:
        return _SPDX.parse(text, validate=True) is not None
    except ExpressionError:
        return False


def table(found: Iterable[Licence]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| package | version | licence | why it may be used |"
    yield "|---|---|---|---|"
    for each in found:
        yield f"| {each.package} | {each.version or 'not installed'} | {each.expression} | {each.reason} |"
