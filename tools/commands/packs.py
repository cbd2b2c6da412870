"""Commands ``kvstore pack export`` and ``kvstore pack import``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.model.errors import ConfigError
from kvstore.tools.commands.options import Lora, Password, PromptFormat, Salt
from kvstore.tools.console import FAILED, Answer, chunk_progress, size
from kvstore.tools.interrupts import INTERRUPTED, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.model.chunks import ChunkRef
    from kvstore.tools.pack import PackReport, Source, Target
    from kvstore.tools.warm.prompts import Prompt, Rejected
    from kvstore.tools.warm.wanted import Sharing

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of the engine whose local_disk is used.")]
Folder = Annotated[Path | None, typer.Option(help="An engine's local_disk, instead of --config.", file_okay=False)]
_FINISHING = "finishing the chunk under way; what was moved stays"


def export_pack(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The pack; an interrupted export is continued.")],
    config: ConfigFile = None,
    folder: Folder = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Export only the chunks of the prompts in this file or folder.")
    ] = None,
    prompt_format: PromptFormat = "auto",
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer reads the prompts.")] = None,
    lora: Lora = None,
    salt: Salt = None,
    namespace: Annotated[str | None, typer.Option(help="First digits of an id, if the folder has several.")] = None,
) -> Answer:
    """Write stored chunks to one file, with its own index and checksums, for use on another machine.

    The engine may be running. Exits with 1 if chunks are damaged, if chunks of a prompt are not stored, or if a prompt
    was skipped; the pack then holds the rest. Exits with 2 if there is nothing to export, or if the pack cannot be
    written; with 130 if interrupted: start it again to go on.
    """
    from kvstore.format.pack import refuse_written  # noqa: PLC0415
    from kvstore.tools.pack import Source, export  # noqa: PLC0415
    from kvstore.tools.warm import wanted  # noqa: PLC0415
    from kvstore.tools.warm.prompts import check_format, read_prompts  # noqa: PLC0415

    refuse_written(output)
    source = Source(_one_folder(config, folder), namespace)
    refs: list[ChunkRef] | None = None
    trails: dict[ChunkRef, bytes] = {}
    rejected: list[Rejected] = []
    if prompts is not None:
        sharing = wanted.Sharing.of(wanted.Lora.parse(lora), salt)
        found = read_prompts(prompts, format_=check_format(prompt_format))
        refs, trails, rejected = _refs(source, found, model, sharing)
    with chunk_progress("exporting") as tick, interruptible(_FINISHING) as should_stop:
        report = export(source, output, refs=refs, trails=trails, tick=tick, should_stop=should_stop)
    return _answer(report, rejected, "exported")


def import_pack(
    pack: Annotated[Path, typer.Argument(help="The pack.", dir_okay=False)],
    *,
    config: ConfigFile = None,
    folder: Folder = None,
    url: Annotated[
        str | None, typer.Option("--url", "--redis", help="URL of a Redis or an object store, instead of a folder.")
    ] = None,
    password: Password = None,
    codec: Annotated[str | None, typer.Option(help="Codec to store with; by default the configuration's.")] = None,
    encryption_keys: Annotated[
        str | None, typer.Option(help="File with keys to encrypt with; by default the configuration's.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Refuse a pack that is not of the model in this folder.")] = None,
    anyway: Annotated[bool, typer.Option(help="Import even beside chunks of another model or settings.")] = False,
) -> Answer:
    """Put a pack's chunks where an engine finds them. No engine may use the folder; a remote store may be in use.

    A pack made for another model, revision, dtype or layout than the chunks in the folder is refused, naming the fields
    that differ. Exits with 2 then, or if the target cannot be used. Exits with 1 if chunks are damaged, if there is no
    room for them, or if the target fails midway; with 130 if interrupted: start it again to go on.
    """
    from kvstore.format.pack import open_pack  # noqa: PLC0415
    from kvstore.tools.pack import import_pack as run  # noqa: PLC0415
    from kvstore.tools.pack import refuse_other_model, refuse_used  # noqa: PLC0415

    target, identity = _target(config, folder, url, password, codec=codec, keys=encryption_keys)
    refuse_used(pack, target.folders)
    if model is not None:
        from kvstore.adapters.vllm.identity import fingerprint_folder  # noqa: PLC0415

        identity = f"files {fingerprint_folder(model)}"
    if identity is not None and not anyway:
        with open_pack(pack) as opened:
            refuse_other_model(opened, identity)
    with chunk_progress("importing") as tick, interruptible(_FINISHING) as should_stop:
        report = run(pack, target, anyway=anyway, tick=tick, should_stop=should_stop)
    return _answer(report, [], "imported")


def _one_folder(config: Path | None, folder: Path | None) -> Path:
    if folder is not None:
        return folder
    from kvstore.config import load_config  # noqa: PLC0415

    folders = load_config(path=config, log_warnings=False).config.local_disk_folders
    if len(folders) != 1:
        raise ConfigError(
            f"local_disk in the configuration names {len(folders)} folders, not one: name one with --folder"
        )
    return Path(folders[0])


def _refs(
    source: Source, prompts: Iterable[Prompt | Rejected], model: str | None, sharing: Sharing
) -> tuple[list[ChunkRef], dict[ChunkRef, bytes], list[Rejected]]:
    """Return the chunks of prompts, the trails of the last chunk of each prompt, and the skipped prompts."""
    from kvstore.tools.warm.prompts import Rejected, load_tokenizer  # noqa: PLC0415
    from kvstore.tools.warm.wanted import wanted  # noqa: PLC0415

    if model is None:
        raise ConfigError("--prompts needs --model, whose tokenizer reads the prompts")
    found = wanted(prompts, source.shards[0].layout, sharing, load_tokenizer(model))
    refs: dict[ChunkRef, None] = {}
    trails: dict[ChunkRef, bytes] = {}
    rejected = []
    for item in found:
        if isinstance(item, Rejected):
            rejected.append(item)
        else:
            refs.update(dict.fromkeys(item.refs))
            trails.update((ref, item.trail) for ref in item.refs[-1:])
    return list(refs), trails, rejected


def _target(
    config: Path | None,
    folder: Path | None,
    url: str | None,
    password: str | None,
    *,
    codec: str | None,
    keys: str | None,
) -> tuple[Target, str | None]:
    """Return the target of an import, and the identity of the model, if the configuration sets ``model_id``."""
    from kvstore.config import load_config  # noqa: PLC0415
    from kvstore.tools.pack import Target  # noqa: PLC0415

    if url is not None:
        options = {"password": password} if password else {}
        return Target(url=url, options=options, codec=codec or "none", encryption_keys=keys), None
    if folder is not None:
        return Target((folder,), codec=codec or "none", encryption_keys=keys), None
    loaded = load_config(path=config, log_warnings=False).config
    if not loaded.local_disk_folders:
        raise ConfigError("the configuration has no local_disk to import into: give --folder or --url")
    folders = tuple(Path(name) for name in loaded.local_disk_folders)
    identity = f"id {loaded.model_id}" if loaded.model_id else None
    stored = codec or loaded.local_disk_serde, keys or loaded.encryption_keys
    return Target(folders, loaded.max_local_disk_bytes, *stored), identity


def _answer(report: PackReport, rejected: list[Rejected], verb: str) -> Answer:
    notes = [*map(str, rejected), *map(str, report.faults)]
    if report.broke:
        notes.append(f"ended in the middle: {report.broke}; start it again to go on")
    if report.interrupted:
        notes.append("interrupted: start it again to go on")
    rest = {"there already": report.present, "not stored": report.missing, "without room": report.refused}
    beside = "".join(f", {count:,} {what}" for what, count in rest.items() if count)
    text = f"{report.path}: {report.chunks:,} chunks {verb}, {size(report.size_bytes)}{beside}"
    tree = asdict(report) | {"rejected": [asdict(item) for item in rejected]}
    failed = FAILED if rejected or not report.is_complete else 0
    return Answer(tree, [text], INTERRUPTED if report.interrupted else failed, notes)
