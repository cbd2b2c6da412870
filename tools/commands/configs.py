"""Commands ``kvstore config``, which check, show and convert configurations."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.model.errors import ConfigError
from kvstore.tools.console import FAILED, Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.config import LoadedConfig

FILE_MODE = 0o600  # the file may contain a password


def check(
    file: Annotated[Path, typer.Argument(help="YAML file, as KVSTORE_CONFIG_FILE names it.")],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="Show every setting, not only what differs.")] = False,
) -> Answer:
    """Check a configuration file as vLLM's start would, and show the settings that result and differ from defaults.

    Exits with 2 if the file cannot be used.
    """
    from kvstore.config import StoreConfig, load_config  # noqa: PLC0415

    loaded = load_config(path=file, log_warnings=False)
    values, defaults = loaded.config.shown(), StoreConfig().shown()
    tree = {"config": values, "origins": dict(loaded.origins), "warnings": list(loaded.warnings)}
    origins = {key: origin.removeprefix(f"file {file}, ") for key, origin in loaded.origins.items()}
    wanted = {key: value for key, value in values.items() if show_all or value != defaults[key]}
    left_out = len(values) - len(wanted)
    notes = [f"{left_out} settings have their defaults: --all shows them"] if left_out else []
    return Answer(tree, [*_warnings(loaded), *_lines(wanted, origins), *notes])


def show(
    file: Annotated[
        Path | None, typer.Argument(help="YAML file; by default the one that KVSTORE_CONFIG_FILE names.")
    ] = None,
    *,
    changed: Annotated[bool, typer.Option(help="Show only values that are set somewhere, not defaults.")] = False,
) -> Answer:
    """Show the values in effect here, including the environment, and where each one came from.

    Passwords are not shown. Exits with 2 if the configuration cannot be used.
    """
    from kvstore.config import load_config  # noqa: PLC0415

    loaded = load_config(path=file, log_warnings=False)
    values = {
        key: value for key, value in loaded.config.shown().items() if not changed or loaded.origins[key] != "default"
    }
    rows = {key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()}
    tree = {"config": rows, "warnings": list(loaded.warnings)}
    return Answer(tree, _lines(values, loaded.origins), notes=_warnings(loaded))


def from_lmcache(
    file: Annotated[Path, typer.Argument(help="YAML file written for LMCache.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default the result is printed.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the output file if it exists.")] = False,
) -> Answer:
    """Convert a configuration of LMCache's, list what has no equivalent, and say what is left to do.

    Exits with 1 if nothing would be cached, with 2 if the file cannot be used, or if the output file exists.
    """
    from kvstore.tools.configs import from_lmcache as convert  # noqa: PLC0415

    converted = convert(file)
    if output is not None:
        _write(output, converted.text, force=force)
    tree = {
        "yaml": converted.text,
        "without_equivalent": list(converted.without_equivalent),
        "recipes": list(converted.recipes),
        "keeps_nothing": converted.keeps_nothing,
    }
    text = [converted.text.removesuffix("\n")] if output is None else []
    notes = [f"no equivalent: {line}" for line in converted.without_equivalent]
    notes += [f"recipe: {line}" for line in converted.recipes]
    if not converted.keeps_nothing:
        return Answer(tree, text, notes=notes)
    error = "nothing would be cached: set local_cpu: true, local_disk or remote_url"
    return Answer(tree, text, FAILED, notes, error)


def _lines(values: Mapping[str, object], origins: Mapping[str, str]) -> list[str]:
    return [f"{key}: {json.dumps(value)}  # {origins[key]}" for key, value in values.items()]


def _warnings(loaded: LoadedConfig) -> list[str]:
    return [f"warning: {warning}" for warning in loaded.warnings]


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL), FILE_MODE)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, FILE_MODE)  # also if the file existed
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: name another file, or add --force") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
