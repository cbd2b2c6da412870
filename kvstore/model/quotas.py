"""Quotas in the configuration: bounds in bytes by name, and the names of requests: of a salt, or of a tag.

A salt may be a secret, so it is named by the beginning of its hash, in the configuration as in metrics. Engines have
quotas by one of both. A server has them by both, within tenants, and engines tell it the ids of owners.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from kvstore.model.errors import ConfigError
from kvstore.model.keys import KeyExtras

ANY_NAME: Final = "*"  # of the quota for all that are not named
OTHERS: Final = "other"  # their name in metrics
OWNER_BYTES: Final = 16
MAX_NAMES: Final = 256
BY_SALT: Final = "salt"
BY_TAG: Final = "tag:"  # before the tag's own name
TENANT_PATTERN: Final = r"[0-9a-zA-Z._-]{1,64}"

_OWNER: Final = b"kvstore/owner/1\0"
_SALT_NAME: Final = re.compile(r"[0-9a-f]{16}")
_SALT: Final = "salt:"  # before the name of a salt at a server
_ANY_OWNER: Final = re.compile(rf"(^|/)({_SALT}|{BY_TAG})")
_OWNER_KEY: Final = re.compile(
    rf"(?:(?P<tenant>{TENANT_PATTERN})/)?"
    rf"(?P<name>{BY_TAG}(?P<tag>[^/]+)/(?P<value>.+)|{_SALT}(?P<salt>{_SALT_NAME.pattern}))"
)
_SEPARATOR: Final = "|"  # between the labels of a metric


def parse_quotas(text: str, key: str, *, shows_names: bool = True) -> dict[str, int]:
    """Parse quotas of the form ``name=GiB, *=GiB``; return bytes by name.

    Args:
        text: as given.
        key: of the configuration, for messages.
        shows_names: False if a name may be a secret, which no message then shows.

    Raises:
        ConfigError: one of them cannot be understood.
    """
    quotas = {}
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, _, size = part.rpartition("=")
        try:
            size_bytes = int(float(size) * (1 << 30))
        except (ValueError, OverflowError):
            size_bytes = -1
        if not name.strip() or size_bytes <= 0:
            shown = repr(part) if shows_names else f"a part, number {number},"
            raise ConfigError(f"{key} has {shown} that is no quota: write a name, =, and a number of GiB")
        quotas[name.strip()] = size_bytes
    return quotas


class OwnerName(NamedTuple):
    """Owner with a quota at a server.

    Attributes:
        key: all of its name in the configuration.
        tenant: of the clients whose chunks it may own; empty for clients without a tenant.
        name: the rest, as metrics show it.
        id: see ``owner_id``.
    """

    key: str
    tenant: str
    name: str
    id: bytes


def owner_named(key: str) -> OwnerName | None:
    """Return the owner that a key such as ``tenant/tag:team/red`` or ``salt:<16 digits>`` names; None if it names none.

    Raises:
        ConfigError: it nearly names one. The message does not show what may be a salt.
    """
    found = _OWNER_KEY.fullmatch(key)
    if found is not None:
        by, name = (BY_SALT, found["salt"]) if found["salt"] else (BY_TAG + found["tag"], found["value"])
        return OwnerName(key, found["tenant"] or "", found["name"], owner_id(by, name))
    if _ANY_OWNER.search(key) is None:
        return None
    shown = "a salt" if _SALT in key else repr(key)
    raise ConfigError(
        f"server_quotas names {shown} in a way that cannot be understood: write tag:NAME/VALUE, or salt: and the first "
        f"16 hexadecimal digits of the salt's SHA-256, after a tenant and / for clients that have one"
    )


def parse_server_quotas(text: str) -> dict[str, int]:
    """Parse ``server_quotas``; return bytes by name.

    Raises:
        ConfigError: one of them cannot be understood, or there are too many owners. No message shows a salt.
    """
    quotas = parse_quotas(text, "server_quotas", shows_names=_SALT not in text)
    num_owners = sum(owner_named(name) is not None for name in quotas)
    if num_owners > MAX_NAMES:
        raise ConfigError(f"server_quotas names {num_owners} tags and salts: at most {MAX_NAMES} are allowed")
    return quotas


def owner_id(by: str, name: str) -> bytes:
    """Return 16 bytes for a name of a salt or tag, by which notes on disk and servers tell whose a chunk is."""
    parts = (part.encode("utf-8", "surrogatepass") for part in (by, name))
    hashed = hashlib.sha256(_OWNER + b"".join(len(part).to_bytes(4, "little") + part for part in parts))
    return hashed.digest()[:OWNER_BYTES]


@dataclass(frozen=True)
class QuotaRules:
    """Quotas of one engine, and the names that they count by.

    Attributes:
        tag: the tag whose value is the name; None for the salt.
        memory_bytes: bounds in memory by name; ``*`` for those not named. Empty for none.
        disk_bytes: the same on disk.
    """

    tag: str | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    disk_bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, by: str, memory: str | None, disk: str | None) -> QuotaRules:
        """Parse the keys of the configuration.

        Raises:
            ConfigError: one of them cannot be understood. No message shows a name where salts are named.
        """
        tag = by.removeprefix(BY_TAG) if by.startswith(BY_TAG) else None
        if tag == "" or (tag is None and by != BY_SALT):
            raise ConfigError(f"quota_by is {by!r}: it must be salt, or tag: and the name of a tag")
        by_tag = tag is not None
        found = [
            parse_quotas(text or "", key, shows_names=by_tag)
            for key, text in (("local_cpu_quotas", memory), ("local_disk_quotas", disk))
        ]
        rules = cls(tag, *found)
        for number, name in enumerate(rules.names, 1):
            if not by_tag and not _SALT_NAME.fullmatch(name):
                raise ConfigError(
                    f"name {number} in local_cpu_quotas and local_disk_quotas is no salt's: with quota_by: salt, write "
                    f"the first 16 hexadecimal digits of the salt's SHA-256"
                )
            if name == OTHERS or _SEPARATOR in name:
                raise ConfigError(
                    f"local_cpu_quotas or local_disk_quotas name {name!r}, which metrics cannot show: use another value"
                )
            if memory and disk and not (name in rules.memory_bytes and name in rules.disk_bytes):
                shown = repr(name) if by_tag else f"name {number}"  # else its pins and retention would have no bound
                raise ConfigError(
                    f"{shown} has a quota in only one of local_cpu_quotas and local_disk_quotas: add it to the other"
                )
        if len(rules.names) > MAX_NAMES:
            raise ConfigError(
                f"local_cpu_quotas and local_disk_quotas have {len(rules.names)} names: at most {MAX_NAMES} are allowed"
            )
        return rules

    def __bool__(self) -> bool:
        return bool(self.memory_bytes or self.disk_bytes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names that have a quota, without ``*``."""
        return tuple(name for name in {**self.memory_bytes, **self.disk_bytes} if name != ANY_NAME)

    def name_of(self, extras: KeyExtras) -> str:
        """Return the name that a request counts by; empty if it has no such salt or tag."""
        if self.tag is None:
            return extras.salt_name
        return next((value for name, value in extras.tags if name == self.tag), "")

    def owner_of(self, name: str) -> bytes:
        """Return the id of a name; none for no name."""
        return owner_id(BY_SALT if self.tag is None else BY_TAG + self.tag, name) if name else b""


NO_QUOTAS: Final = QuotaRules()
