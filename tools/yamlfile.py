"""Reader of small YAML files that people write, checked by a model of pydantic."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kvstore.model.errors import ConfigError

_MAX_BYTES: Final = 1 << 20

Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: Path, kind: type[Model], what: str, remedy: str) -> Model:
    """Read a file of at most 1 MiB.

    Args:
        path: the file.
        kind: model of its contents.
        what: name of such a file, as in ``the engines' file``.
        remedy: advice to whoever wrote it.

    Raises:
        ConfigError: the file is invalid; the message names the place and the remedy.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{what} {path} has more than {_MAX_BYTES} bytes: {remedy}")
    try:
        return kind.model_validate(yaml.safe_load(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(f"{what} {path}: {where}: {first['msg']}: {remedy}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an invalid date is a ValueError
        raise ConfigError(f"{what} {path} is no YAML: {remedy}") from error
