"""Common base of the classes of keys: their settings, and the types used by several keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kvstore.format.codecs import CODEC_NAMES
from kvstore.model.errors import ConfigError
from kvstore.policies import POLICIES, choose_policy

GIB_BYTES: Final = 2**30
MAX_TIMEOUT_S: Final = 86_400
_MAX_SIZE_GIB: Final = 1_000_000
_MIN_LIKE_BYTES: Final = 2**26  # 64 MiB; larger numbers are taken for bytes


class Keys(BaseModel):
    """Some keys of a configuration. The string below a key is its meaning, which messages and documentation show."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Unit:
    """The unit of a number, as messages and documentation name it."""

    name: str


def require_one_of(value: str, known: Collection[str]) -> str:
    """Return the value if it is known.

    Raises:
        PydanticCustomError: it is not; the message lists the known ones.
    """
    if value not in known:
        raise PydanticCustomError("one_of", "must be one of {known}", {"known": ", ".join(known)})
    return value


def _check_codec(value: str) -> str:
    return require_one_of(value, CODEC_NAMES)


def check_policy(value: str) -> str:
    """Return the name of a policy, including LMCache's, if it exists.

    Raises:
        PydanticCustomError: there is no such policy.
    """
    try:
        choose_policy(value)
    except ConfigError:
        require_one_of(value, POLICIES)
    return value


def _read_auto(value: object) -> object:
    return None if value == "auto" else value


def as_tuple(value: object) -> object:
    """Return a list, or text with commas, as a tuple; anything else unchanged."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return tuple(value) if isinstance(value, list) else value


def _check_gib(value: float) -> float:
    if value <= _MAX_SIZE_GIB:
        return value
    unit, size_gib = ("bytes", value / GIB_BYTES) if value >= _MIN_LIKE_BYTES else ("KB or MB", value / 2**10)
    message = "looks like {unit}; GiB are expected, such as {size}"
    raise PydanticCustomError("size", message, {"unit": unit, "size": f"{size_gib:.3g}"})


Tokens = Annotated[int, Unit("tokens"), Field(ge=0)]
Gib = Annotated[float, Unit("GiB per worker"), AfterValidator(_check_gib)]
Seconds = Annotated[float, Unit("seconds"), Field(le=MAX_TIMEOUT_S)]
Threads = Annotated[int, Unit("threads"), Field(ge=1, le=64)]
QueueLength = Annotated[int | None, Unit("chunks"), Field(ge=1)]
Text = Annotated[str | None, Field(min_length=1)]
Switch = Annotated[bool | None, BeforeValidator(_read_auto)]
"""True, false, or None for ``auto``."""
Codec = Annotated[str, AfterValidator(_check_codec)]
