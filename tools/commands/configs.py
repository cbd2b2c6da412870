"""``kvstore config show`` and ``kvstore config from-lmcache``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools.console import AsJson, errors, give_up

FILE_MODE = 0o600  # a password may stand in it


def show(
    file: Annotated[Path | None, typer.Argument(help="In place of the one that KVSTORE_CONFIG_FILE names.")] = None,
    *,
    changed: Annotated[bool, typer.Option(help="Only what is not the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the values in effect here, environment included, and where each came from.

    Passwords are not shown. Exits with 2 if the configuration cannot be used.
    """
    from kvstore.config import load_config  # noqa: PLC0415

    try:
        loaded = load_config(path=file, log_warnings=False)
    except KVStoreError as error:
        give_up(error)
    values = loaded.config.shown()
    shown = [key for key in values if not changed or loaded.origins[key] != "default"]
    if as_json:
        rows = {key: {"value": values[key], "origin": str(loaded.origins[key])} for key in shown}
        print(json.dumps({"config": rows, "warnings": list(loaded.warnings)}))
        return
    for key in shown:
        print(f"{key}: {json.dumps(values[key])}  # {loaded.origins[key]}")
    for warning in loaded.warnings:
        errors().print(f"warning: {warning}")


def from_lmcache(
    file: Annotated[Path, typer.Argument(help="A YAML file written for LMCache.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it; else it is printed.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the output file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration of LMCache's, and list what has no equivalent.

    Exits with 2 if the file cannot be used, or the output exists.
    """
    from kvstore.tools.configs import from_lmcache as convert  # noqa: PLC0415

    try:
        converted = convert(file)
        if output is not None:
            _write(output, converted.text, force=force)
    except KVStoreError as error:
        give_up(error)
    if as_json:
        print(json.dumps({"yaml": converted.text, "without_equivalent": list(converted.without_equivalent)}))
        return
    if output is None:
        print(converted.text, end="")
    for line in converted.without_equivalent:
        errors().print(f"no equivalent: {line}")


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL), FILE_MODE)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: name another file, or --force") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
