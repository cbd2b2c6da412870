"""Parsing of a remote tier's URL, and of its options, in the URL or separate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from kvstore.model.errors import ConfigError


class OptionType(NamedTuple):
    """Type of an option, and the description of its values in messages."""

    type: TypeAdapter[Any]
    called: str


_ENCODE: Final = "If it has a password with characters other than letters and digits, percent-encode these"

TEXT: Final = OptionType(TypeAdapter(Annotated[str, Field(min_length=1)]), "a text")
FILE: Final = OptionType(TypeAdapter(Path), "the path of a file")
FLAG: Final = OptionType(TypeAdapter(bool), "true or false")
WHOLE: Final = OptionType(TypeAdapter(Annotated[int, Field(ge=0)]), "a whole number of 0 at least")
COUNT: Final = OptionType(TypeAdapter(Annotated[int, Field(ge=1)]), "a whole number of 1 at least")
SECONDS: Final = OptionType(
    TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)]), "a positive number of seconds"
)


def split_url(url: object, what: str, example: str) -> SplitResult:
    """Split a URL, without checking hosts and ports yet.

    Raises:
        ConfigError: it is no URL. The message does not show it, as it may contain a password.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a {what} tier needs the option 'url', such as {example}")
    try:
        url.encode()  # JSON may hold half of a character, which no name or path may
        return urlsplit(url)
    except ValueError:
        raise ConfigError(f"the URL of the {what} cannot be read: {_ENCODE}") from None


def host_and_port(parts: SplitResult, what: str) -> tuple[str, int | None]:
    """Return the host and the port of a URL; a missing host is empty.

    Raises:
        ConfigError: its port is invalid. The message does not show it: after a password with a slash, it is part of
            that.
    """
    try:
        return parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(f"{what} names a wrong port: it must be 0 to 65535. {_ENCODE}") from None


def option_types_of(target: type) -> dict[str, OptionType]:
    """Return the options among the fields of a class, which are those annotated with an ``OptionType``."""
    hints = get_type_hints(target, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}


def read_options(what: str, option_types: Mapping[str, OptionType], *given: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of all given options, where later mappings take precedence and None is ignored.

    Raises:
        ConfigError: names the option that is unknown or has an invalid value.
    """
    options = {name: value for some in given for name, value in some.items() if value is not None}
    for name, value in options.items():
        if name not in option_types:
            raise ConfigError(f"a {what} has no option {name!r}: it knows {', '.join(option_types)}")
        try:
            options[name] = option_types[name].type.validate_python(value)
        except ValidationError as error:
            shown = "" if "password" in name else f", not {value!r}"
            message = f"the {what} option {name!r} cannot be used: it must be {option_types[name].called}{shown}"
            raise ConfigError(message) from (None if "password" in name else error)
    return options
