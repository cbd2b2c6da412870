"""Parser of the file that names a proxy's engines, which may change while the proxy runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstore.model.errors import ConfigError
from kvstore.tools.proxy.listing import Listed, Listing, Receiver

_MAX_FILE_BYTES: Final = 1 << 20
_MAX_ENGINES: Final = 1000  # of one role
_REMEDY: Final = "write it as docs/disaggregation.md shows, and check it with kvstore proxy --engines FILE --check"


class _Engine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    url: str
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0


class _DecodeEngine(_Engine):
    kv: str | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prefill: Annotated[list[_Engine], Field(max_length=_MAX_ENGINES)] = []
    decode: Annotated[list[_DecodeEngine], Field(min_length=1, max_length=_MAX_ENGINES)]


def read_listing(path: Path) -> Listing:
    """Read the engines in a file.

    Raises:
        ConfigError: the file is invalid; the message names the place and a remedy.
    """
    content = _content(path)
    try:
        found = _File.model_validate(yaml.safe_load(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(f"the engines' file {path}: {where}: {first['msg']}: {_REMEDY}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an invalid date is a ValueError
        raise ConfigError(f"the engines' file {path} is no YAML: {_REMEDY}") from error
    listing = Listing(
        tuple(Listed(engine.url.rstrip("/"), None, engine.weight) for engine in found.prefill),
        tuple(Listed(engine.url.rstrip("/"), _receiver(engine.kv, path), engine.weight) for engine in found.decode),
    )
    listing.check(f"{path}: prefill", f"{path}: decode")
    return listing


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the engines' file {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"the engines' file {path} has more than {_MAX_FILE_BYTES} bytes: {_REMEDY}")
    return content


def _receiver(url: str | None, path: Path) -> Receiver | None:
    return None if url is None else Receiver.parse(url, f"{path}: kv")
