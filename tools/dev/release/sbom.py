"""A software bill of materials in CycloneDX's JSON: kvstore, what it requires, and what that requires."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from kvstore.model.errors import ConfigError
from kvstore.tools.dev.release.installed import NAME, Package
from kvstore.tools.dev.release.licences import UNKNOWN, Licence

_SCHEMA: Final = SchemaVersion.V1_6


def bill_of_materials(version: str, time_s: int, packages: Mapping[str, Package], licences: Iterable[Licence]) -> str:
    """Return the bill as JSON, the same for the same packages.

    Args:
        version: kvstore's.
        time_s: the time to write into it, in seconds since 1970.
        packages: by name.
        licences: of the packages.

    Raises:
        ConfigError: it does not match the schema of CycloneDX.
    """
    expressions = {licence.package: licence.expression for licence in licences}
    root = _component(NAME, version, "Apache-2.0")
    required = _reachable({name for name, package in packages.items() if "" in package.asked}, packages)
    known = {name: _of(package, expressions[name], is_required=name in required) for name, package in packages.items()}
    bom = Bom(components=known.values(), serial_number=uuid.UUID(int=0))
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(time_s, UTC)
    bom.register_dependency(root, [known[name] for name, package in packages.items() if package.asked])
    for name, package in packages.items():
        bom.register_dependency(known[name], [known[other] for other in sorted(package.needs)])
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, _json(bom))
    text = _json(bom)
    error = JsonStrictValidator(_SCHEMA).validate_str(text)
    if error is not None:
        raise ConfigError(f"the bill of materials is not of CycloneDX {_SCHEMA.to_version()}: {error}")
    return text


def _json(bom: Bom) -> str:
    return make_outputter(bom, OutputFormat.JSON, _SCHEMA).output_as_string(indent=2)


def _reachable(names: set[str], packages: Mapping[str, Package]) -> set[str]:
    """Return these names, and those of all that they need."""
    found: set[str] = set()
    while names:
        found |= names
        names = {other for name in names for other in packages[name].needs} - found
    return found


def _of(package: Package, expression: str, *, is_required: bool) -> Component:
    found = _component(package.name, package.version, expression)
    found.scope = ComponentScope.REQUIRED if is_required else ComponentScope.OPTIONAL
    for extra, specifier in package.asked.items():
        found.properties.add(Property(name=f"kvstore:required{f':{extra}' if extra else ''}", value=specifier or "any"))
    return found


def _component(name: str, version: str | None, expression: str) -> Component:
    purl = PackageURL("pypi", None, name, version)
    licences = [] if expression == UNKNOWN else [LicenseFactory().make_from_string(expression)]
    kind = ComponentType.LIBRARY
    return Component(name=name, version=version, type=kind, purl=purl, bom_ref=str(purl), licenses=licences)
