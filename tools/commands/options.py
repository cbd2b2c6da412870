"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file; by default the one that KVSTORE_CONFIG_FILE names.")
]
PromptFormat = Annotated[str, typer.Option("--format", help="Format of the prompt files: auto, jsonl, lines or text.")]
PromptFiles = Annotated[Path, typer.Option("--prompts", help="A .jsonl or text file, or a folder of such files.")]
Lora = Annotated[str | None, typer.Option(help="Adapter, as name=folder.")]
Salt = Annotated[str | None, typer.Option(help="cache_salt of the prompts that have none.")]
Password = Annotated[str | None, typer.Option(envvar="KVSTORE_REMOTE_PASSWORD", help="Password of the Redis.")]
