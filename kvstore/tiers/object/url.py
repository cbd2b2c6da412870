"""Address of an object store or a shared folder, from a URL, and from options for values that should not be in a URL.

    s3://bucket[/prefix]        S3, and stores with its interface
    az://container[/prefix]     Azure Blob Storage
    gs://bucket[/prefix]        Google Cloud Storage
    file:///path                a folder that many hosts share

Options follow ``?`` or come from the tier's options, which take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from kvstore.model.errors import ConfigError
from kvstore.tiers.url_options import COUNT, FILE, FLAG, SECONDS, TEXT, option_types_of, read_options, split_url

_FORMS = "s3://bucket, az://container, gs://bucket or file:///path"


class Kind(Enum):
    """Kind of storage, by the scheme of its URL."""

    S3 = "s3"
    AZURE = "az"
    GOOGLE = "gs"
    FOLDER = "file"


@dataclass(frozen=True)
class ObjectTarget:
    """Storage, and all settings to use it.

    Attributes:
        kind: of the storage.
        bucket: bucket or container; for a folder its path.
        prefix: of all names, without slashes at its ends.
        endpoint: URL of a store with the interface of S3 or Azure; None for the provider's own.
        region: of the bucket; None for the environment's, or with an endpoint ``us-east-1``.
        path_style: the bucket's name is in the path, not in the host; None with an endpoint only.
        tls_ca: file of the certificates to trust; None for the system's.
        credentials_file: file with credentials; None for those in the environment or of the machine's role.
        profile: the section of that file.
        connections: maximum at the same time.
        timeout_s: longest silence of the store in the middle of a call.
        connect_timeout_s: longest time to connect.
    """

    kind: Kind
    bucket: str
    prefix: str = ""
    endpoint: Annotated[str | None, TEXT] = None
    region: Annotated[str | None, TEXT] = None
    path_style: Annotated[bool | None, FLAG] = None
    tls_ca: Annotated[Path | None, FILE] = None
    credentials_file: Annotated[Path | None, FILE] = None
    profile: Annotated[str, TEXT] = "default"
    connections: Annotated[int, COUNT] = 8
    timeout_s: Annotated[float, SECONDS] = 5.0
    connect_timeout_s: Annotated[float, SECONDS] = 2.0

    def __str__(self) -> str:
        path = f"/{self.prefix}" if self.prefix else ""
        return f"{self.kind.value}://{self.bucket}{path}"


_TYPES = option_types_of(ObjectTarget)
_OF_FOLDERS = ("connections", "timeout_s")


def parse_target(url: object, options: Mapping[str, object]) -> ObjectTarget:
    """Parse a URL. Options that are None are ignored.

    Raises:
        ConfigError: names the error, without the URL.
    """
    parts = split_url(url, "object", "s3://bucket/prefix")
    _require(parts.scheme in {kind.value for kind in Kind}, f"it must be {_FORMS}")
    kind = Kind(parts.scheme)
    _require("@" not in parts.netloc, "credentials do not belong in a URL: see credentials_file")
    given: dict[str, Any] = read_options("store of objects", _TYPES, dict(parse_qsl(parts.query)), options)
    path = unquote(parts.path)
    if kind is Kind.FOLDER:
        _require(not parts.netloc and path.startswith("/"), "a folder is named by its whole path: file:///mnt/kv")
        _require(path.strip("/") != "", "the root of the file system cannot be used: name a folder in it")
        unknown = next((name for name in given if name not in _OF_FOLDERS), None)
        _require(unknown is None, f"a folder has no option {unknown!r}")
        return ObjectTarget(kind, path.rstrip("/"), **given)
    _require(bool(parts.netloc), f"it names no bucket: {_FORMS}")
    prefix = path.strip("/")
    _require(all(part not in ("", ".", "..") for part in prefix.split("/")) or not prefix, "its prefix has empty parts")
    return ObjectTarget(kind, parts.netloc, prefix, **given)


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise ConfigError(f"the URL of the store of objects cannot be used: {otherwise}")
