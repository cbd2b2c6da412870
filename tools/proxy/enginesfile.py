"""Parser of the file that names a proxy's engines, which may change while the proxy runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from kvstore.tools.proxy.listing import Listed, Listing, Receiver
from kvstore.tools.yamlfile import read_yaml

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
    found = read_yaml(path, _File, "the engines' file", _REMEDY)
    listing = Listing(
        tuple(Listed(engine.url.rstrip("/"), None, engine.weight) for engine in found.prefill),
        tuple(Listed(engine.url.rstrip("/"), _receiver(engine.kv, path), engine.weight) for engine in found.decode),
    )
    listing.check(f"{path}: prefill", f"{path}: decode")
    return listing


def _receiver(url: str | None, path: Path) -> Receiver | None:
    return None if url is None else Receiver.parse(url, f"{path}: kv")
