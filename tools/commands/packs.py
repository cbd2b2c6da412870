"""``kvstore pack export`` and ``kvstore pack import``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools.console import FAILED, AsJson, errors, give_up, progress, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.progress import Progress

    from kvstore.chunks import ChunkRef
    from kvstore.tools.pack import PackReport, Source, Target
    from kvstore.tools.warm.prompts import Prompt, Rejected
    from kvstore.tools.warm.wanted import Sharing

pack_app = typer.Typer(help="Ship chunks in one file: export, import.", no_args_is_help=True)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of the engine; its local_disk is used.")]
Folder = Annotated[Path | None, typer.Option(help="An engine's local_disk, instead of --config.", file_okay=False)]
PromptFormat = Annotated[str, typer.Option("--format", help="auto, jsonl, lines or text.")]
LoraOption = Annotated[str | None, typer.Option(help="name=folder of an adapter.")]
SaltOption = Annotated[str | None, typer.Option(help="cache_salt of prompts that have none.")]


@pack_app.command(
    "export",
    epilog="Example: kvstore pack export --config kvstore.yaml -o system.kvpack --prompts system/ --model llama/",
)
def export_command(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The pack; an interrupted export is gone on with.")],
    config: ConfigFile = None,
    folder: Folder = None,
    prompts: Annotated[Path | None, typer.Option(help="Only the chunks of these: file or folder; else all.")] = None,
    prompt_format: PromptFormat = "auto",
    model: Annotated[str | None, typer.Option(help="Whose tokenizer reads the prompts.")] = None,
    lora: LoraOption = None,
    salt: SaltOption = None,
    namespace: Annotated[str | None, typer.Option(help="Begin of an id, if the folder has several.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write stored chunks into one file with its own index and checksums, which another machine can use.

    The engine may be running. Exits with 1 if chunks are damaged, or chunks of a prompt not stored, or a prompt was
    passed by; the pack then holds the rest. Exits with 2 if there is nothing to export, or no pack can be written.
    """
    from kvstore.tools.pack import Source, export  # noqa: PLC0415
    from kvstore.tools.warm.prompts import Rejected, check_format, read_prompts  # noqa: PLC0415
    from kvstore.tools.warm.wanted import Lora, Sharing  # noqa: PLC0415

    try:
        source = Source(_one_folder(config, folder), namespace)
        refs, rejected = None, list[Rejected]()
        if prompts is not None:
            sharing = Sharing.of(Lora.parse(lora), salt)
            refs, rejected = _refs(source, read_prompts(prompts, format_=check_format(prompt_format)), model, sharing)
        with progress("chunks") as bar:
            report = export(source, output, refs=refs, tick=_ticker(bar, "exporting"))
    except KVStoreError as error:
        give_up(error)
    _tell(report, rejected, as_json=as_json, verb="exported")


@pack_app.command("import", epilog="Example: kvstore pack import system.kvpack --config kvstore.yaml")
def import_command(
    pack: Annotated[Path, typer.Argument(help="The pack.", dir_okay=False)],
    *,
    config: ConfigFile = None,
    folder: Folder = None,
    redis: Annotated[str | None, typer.Option(help="URL of a Redis instead of a folder.")] = None,
    password: Annotated[str | None, typer.Option(envvar="KVSTORE_REMOTE_PASSWORD", help="Of the Redis.")] = None,
    codec: Annotated[str | None, typer.Option(help="Encode with; else as the configuration says, or none.")] = None,
    model: Annotated[Path | None, typer.Option(help="Refuse a pack of another model than this folder's.")] = None,
    anyway: Annotated[bool, typer.Option(help="Also beside chunks of another model or settings.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put a pack's chunks where an engine finds them. The engine must not be running, unless the target is a Redis.

    A pack made for another model, revision, dtype or layout than what is in the folder is refused, and the fields that
    differ are named: exits with 2, as if the target cannot be used. Exits with 1 if chunks are damaged, there is no
    room for them, or the target breaks in the middle.
    """
    from kvstore.format.pack import open_pack  # noqa: PLC0415
    from kvstore.tools.pack import import_pack, refuse_other_model  # noqa: PLC0415

    try:
        target, identity = _target(config, folder, redis, password, codec)
        if model is not None:
            from kvstore.adapters.vllm.identity import fingerprint_folder  # noqa: PLC0415

            identity = f"files {fingerprint_folder(model)}"
        if identity is not None and not anyway:
            with open_pack(pack) as opened:
                refuse_other_model(opened, identity)
        with progress("chunks") as bar:
            report = import_pack(pack, target, anyway=anyway, tick=_ticker(bar, "importing"))
    except KVStoreError as error:
        give_up(error)
    _tell(report, [], as_json=as_json, verb="imported")


def _one_folder(config: Path | None, folder: Path | None) -> Path:
    if folder is not None:
        return folder
    from kvstore.config import load_config  # noqa: PLC0415

    folders = load_config(path=config, log_warnings=False).config.local_disk_folders
    if len(folders) != 1:
        raise ConfigError("name the folder with --folder: the configuration has no local_disk, or several")
    return Path(folders[0])


def _refs(
    source: Source, prompts: Iterable[Prompt | Rejected], model: str | None, sharing: Sharing
) -> tuple[list[ChunkRef], list[Rejected]]:
    """The chunks of prompts, and what was passed by."""
    from kvstore.tools.warm.prompts import Rejected, load_tokenizer  # noqa: PLC0415
    from kvstore.tools.warm.wanted import wanted  # noqa: PLC0415

    if model is None:
        raise ConfigError("--prompts needs --model, whose tokenizer reads them")
    found = wanted(prompts, source.shards[0].layout, sharing, load_tokenizer(model))
    refs: dict[ChunkRef, None] = {}
    rejected = []
    for item in found:
        if isinstance(item, Rejected):
            rejected.append(item)
        else:
            refs.update(dict.fromkeys(item.refs))
    return list(refs), rejected


def _target(
    config: Path | None, folder: Path | None, redis: str | None, password: str | None, codec: str | None
) -> tuple[Target, str | None]:
    """Where a pack goes, and the identity of the model that is to use it, if the configuration names that."""
    from kvstore.config import load_config  # noqa: PLC0415
    from kvstore.tools.pack import Target  # noqa: PLC0415

    if redis is not None:
        options = {"password": password} if password else {}
        return Target(url=redis, options=options, codec=codec or "none"), None
    if folder is not None:
        return Target((folder,), codec=codec or "none"), None
    loaded = load_config(path=config, log_warnings=False).config
    if not loaded.local_disk_folders:
        raise ConfigError("the configuration has no local_disk to import into: name a --folder, or a --redis")
    folders = tuple(Path(name) for name in loaded.local_disk_folders)
    identity = f"id {loaded.model_id}" if loaded.model_id else None
    return Target(folders, loaded.max_local_disk_bytes, codec or loaded.local_disk_serde), identity


def _ticker(bar: Progress, what: str) -> Callable[[int, int], None]:
    task = bar.add_task(what, total=None, rate="")

    def tick(total: int, _size_bytes: int) -> None:
        speed = bar.tasks[0].speed
        bar.update(task, total=total, advance=1, rate=f"{speed:,.0f}" if speed else "")

    return tick


def _tell(report: PackReport, rejected: list[Rejected], *, as_json: bool, verb: str) -> None:
    if as_json:
        tree = asdict(report) | {"faults": [fault._asdict() for fault in report.faults]}
        print(json.dumps(tree | {"rejected": [item._asdict() for item in rejected]}))
    else:
        for item in rejected:
            errors().print(f"{item.where}: {item.why}")
        for fault in report.faults:
            errors().print(f"{fault.place}: {fault.damage}")
        if report.broke:
            errors().print(f"ended in the middle: {report.broke}; start it again to go on")
        rest = {"there already": report.present, "not stored": report.missing, "without room": report.refused}
        beside = "".join(f", {count:,} {what}" for what, count in rest.items() if count)
        print(f"{report.path}: {report.chunks:,} chunks {verb}, {size(report.size_bytes)}{beside}")
    if rejected or not report.is_complete:
        raise typer.Exit(FAILED)
