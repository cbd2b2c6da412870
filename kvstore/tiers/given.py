"""What a remote tier is given: a URL, and options in it or beside it, for what does not belong into one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from kvstore.errors import ConfigError


class Kind(NamedTuple):
    """A kind of option: its type, and what messages call that."""

    type: TypeAdapter[Any]
    called: str


_ENCODE: Final = "If it has a password with characters other than letters and digits, percent-encode these"

TEXT: Final = Kind(TypeAdapter(Annotated[str, Field(min_length=1)]), "a text")
FILE: Final = Kind(TypeAdapter(Path), "the path of a file")
FLAG: Final = Kind(TypeAdapter(bool), "true or false")
WHOLE: Final = Kind(TypeAdapter(Annotated[int, Field(ge=0)]), "a whole number of 0 at least")
COUNT: Final = Kind(TypeAdapter(Annotated[int, Field(ge=1)]), "a whole number of 1 at least")
SECONDS: Final = Kind(TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)]), "a positive number of seconds")


def split_url(url: object, what: str, example: str) -> SplitResult:
    """The parts of a URL, whose hosts and ports are not checked yet.

    Raises:
        ConfigError: it is none. Shows nothing of it, as it may contain a password.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a {what} tier needs the option 'url', such as {example}")
    try:
        return urlsplit(url)
    except ValueError:
        raise ConfigError(f"the URL of the {what} cannot be read: {_ENCODE}") from None


def host_and_port(parts: SplitResult, what: str) -> tuple[str, int | None]:
    """Where a URL leads; no host is empty.

    Raises:
        ConfigError: its port is none. Does not show it: behind a password with a slash, it is a part of that.
    """
    try:
        return parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(f"{what} names a wrong port: it must be 0 to 65535. {_ENCODE}") from None


def kinds_of(target: type) -> dict[str, Kind]:
    """The options among the fields of a class: those annotated with a kind."""
    hints = get_type_hints(target, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}


def read_options(what: str, kinds: Mapping[str, Kind], *given: Mapping[str, object]) -> dict[str, Any]:
    """The values of all options that are given, the later ones before the earlier ones; None does not count.

    Raises:
        ConfigError: names the option that the tier does not have, or that has no such value.
    """
    options = {name: value for some in given for name, value in some.items() if value is not None}
    for name, value in options.items():
        if name not in kinds:
            raise ConfigError(f"a {what} has no option {name!r}: it knows {', '.join(kinds)}")
        try:
            options[name] = kinds[name].type.validate_python(value)
        except ValidationError as error:
            shown = "" if "password" in name else f", not {value!r}"
            message = f"the {what} option {name!r} cannot be used: it must be {kinds[name].called}{shown}"
            raise ConfigError(message) from (None if "password" in name else error)
    return options
