"""Command ``kvstore flags``, which prints the flag to start vLLM with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore.model.errors import ConfigError
from kvstore.tools.console import Answer, errors


def flags(
    file: Annotated[Path | None, typer.Argument(help="YAML file; without one, what the options say.")] = None,
    *,
    memory: Annotated[float | None, typer.Option(help="GiB of CPU memory for each worker.")] = None,
    disk: Annotated[str | None, typer.Option(help="Folder on a fast local disk; needs --disk-size.")] = None,
    disk_size: Annotated[float | None, typer.Option(help="GiB of disk for each worker.")] = None,
    remote: Annotated[str | None, typer.Option(help="URL of a Redis or a cache server that engines share.")] = None,
    role: Annotated[
        str | None, typer.Option(help="both, producer (computes prompts for others) or consumer (goes on with them).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key, as KEY=VALUE; may be repeated.")
    ] = None,
) -> Answer:
    """Print the one flag with which vLLM uses kvstore, for a file or for options; options count before the file.

    It holds all settings: neither a file nor a variable is needed. Copy it, or let the shell put it in:

    vllm serve MODEL --kv-transfer-config "$(kvstore flags --memory 20 --json)"

    eval "vllm serve MODEL $(kvstore flags --memory 20)"

    Exits with 2 if the configuration cannot be used.
    """
    from kvstore.tools.flags import as_shell, make_flags, parse_settings  # noqa: PLC0415

    for name, value in (("--disk", disk), ("--remote", remote)):
        if value == "":
            raise ConfigError(f"{name} is empty: is a variable of the shell not set?")
    named = {
        "max_local_cpu_size": memory,
        "local_disk": disk,
        "max_local_disk_size": disk_size,
        "remote_url": remote,
    }
    given = {key: value for key, value in named.items() if value is not None}
    made = make_flags(file, {**parse_settings(settings or ()), **given}, role, os.environ)
    for note in made.notes:  # also with --json, whose output a shell puts into a command
        errors().print(note)
    return Answer(made.transfer, [as_shell(made.transfer)])
