"""Reports for ``kvstore inspect`` on the contents of a chunk, a folder or a pack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvstore.format.chunkfile import parse_chunk_name
from kvstore.format.images import MAX_HEADER_BYTES, Facts, read_facts
from kvstore.format.pack import MAGIC, open_pack
from kvstore.model.errors import ConfigError
from kvstore.model.keys import NAMESPACE_ID_BYTES, PREFIX_KEY_BYTES
from kvstore.tiers import leads_to
from kvstore.tiers.disk.inventory import Inventory, inventories

Tree = dict[str, Any]

_KEY = re.compile(rf"[0-9a-f]{{{2 * PREFIX_KEY_BYTES}}}")


def inspect_target(target: str, *, folder: Path | None = None) -> Tree:
    """Return the kind and the contents of ``target``.

    Args:
        target: a chunk file, a folder of the disk tier or of a cache server, a pack, the URL of an object store or of a
            Mooncake Store; or a prefix key in hex, which is searched in ``folder``.
        folder: folder to search for a key.

    Raises:
        ConfigError: there is no such thing.
    """
    if _KEY.fullmatch(target.lower()):
        if folder is None:
            raise ConfigError("a key is searched in a folder: name it with --folder")
        return _inspect_key(target.lower(), folder)
    if leads_to(target, "object"):
        return _inspect_objects(target)
    if leads_to(target, "mooncake"):
        from kvstore.tiers.mooncake.inventory import describe  # noqa: PLC0415 - only for such URLs
        from kvstore.tiers.mooncake.url import parse_target  # noqa: PLC0415

        return describe(parse_target(target, {}))
    path = Path(target)
    if path.is_dir():
        return _inspect_folder(path)
    if not path.is_file():
        raise ConfigError(f"there is no {target}: name a chunk file, a folder, a pack, or a key of 32 hex digits")
    begin = _begin_of(path)
    if begin.startswith(MAGIC):
        with open_pack(path) as pack:
            return {"kind": "pack", "path": str(path), **pack.describe()}
    facts = read_facts(begin)
    if facts is None:
        raise ConfigError(f"{path} is neither a chunk file nor a pack")
    return _inspect_chunk(path, facts)


def _inspect_key(key: str, folder: Path) -> Tree:
    chunks = [
        _inspect_chunk(path, facts)
        for inventory in inventories(folder)
        for path in (inventory.home / key[:2]).glob(f"{key}-*.safetensors")
        if (facts := inventory.facts(path))
    ]
    if not chunks:
        raise ConfigError(f"no namespace in {folder} has a readable chunk {key}: see kvstore verify {folder}")
    return chunks[0] if len(chunks) == 1 else {"kind": "chunks", "chunks": chunks}


def _inspect_chunk(path: Path, facts: Facts) -> Tree:
    """Return the facts in a chunk file and, if it is in a folder of the disk tier, whether it is sound."""
    tree: Tree = {"kind": "chunk", "path": str(path), **facts._asdict(), "file_bytes": path.stat().st_size}
    if facts.key_id is None:
        del tree["key_id"]
    home = path.absolute().parent.parent
    chunk = parse_chunk_name(path.parent.name, path.name)
    tree["sound"] = None
    if chunk is not None and chunk.until_s is not None:
        tree["expires"] = datetime.fromtimestamp(chunk.until_s, UTC).isoformat()
    if chunk is not None and re.fullmatch(rf"[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}", home.name):
        inventory = Inventory(home)
        checked = inventory.read(*chunk)
        tree["sound"] = not isinstance(checked, str)
        if isinstance(checked, str):
            tree["damage"] = checked
        tree["namespace_fields"] = _fields(inventory)
    return tree


def _inspect_folder(folder: Path) -> Tree:
    found = inventories(folder)
    if not found:
        raise ConfigError(f"{folder} is no folder of the disk tier: there is no namespace in it")
    kind = "server folder" if all(inventory.is_servers for inventory in found) else "folder"
    return {"kind": kind, "path": str(folder), "namespaces": [_inspect_inventory(inventory) for inventory in found]}


def _inspect_inventory(inventory: Inventory) -> Tree:
    refs = [(place.path, place.ref) for place in inventory.places() if place.ref is not None]
    sizes = [path.lstat().st_size for path, _ in refs]
    layout = inventory.layout
    tokens = sum(ref.num_blocks for _, ref in refs) * layout.block_tokens if layout else None
    return {
        "namespace": inventory.home.name,
        "path": str(inventory.home),
        "fields": _fields(inventory),
        "chunks": len(refs),
        "tokens": tokens,
        "file_bytes": sum(sizes),
        "layers": layout.num_layers if layout else None,
        "block_tokens": layout.block_tokens if layout else None,
        "bytes_per_token": layout.block_bytes // layout.block_tokens if layout and inventory.is_layout_noted else None,
    }


def _inspect_objects(url: str) -> Tree:
    from kvstore.tiers.object.inventory import ObjectInventory  # noqa: PLC0415 - only for such URLs

    with closing(ObjectInventory(url, {})) as inventory:
        namespaces = []
        for home, found in groupby(inventory.places(), attrgetter("home")):
            places, layout, fields = list(found), inventory.layout(home), inventory.fields(home)
            tokens = sum(place.ref.num_blocks for place in places) * layout.block_tokens if layout else None
            namespaces.append(
                {
                    "namespace": home.namespace_id.hex(),
                    "fields": fields,
                    "chunks": len(places),
                    "tokens": tokens,
                    "file_bytes": sum(inventory.sizes[place] for place in places),
                    "layers": layout.num_layers if layout else None,
                    "block_tokens": layout.block_tokens if layout else None,
                }
            )
        return {"kind": "objects", "path": inventory.store.place, "namespaces": namespaces}


def _fields(inventory: Inventory) -> Mapping[str, str | int] | None:
    return dict(inventory.namespace.fields) if inventory.namespace else None


def _begin_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_HEADER_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def lines(tree: Mapping[str, Any], indent: int = 0) -> list[str]:
    """Format a tree for people, one line per field, with lists and mappings indented."""
    shown: list[str] = []
    pad = "  " * indent
    for name, value in tree.items():
        if isinstance(value, Mapping):
            shown += [f"{pad}{name}:", *lines(value, indent + 1)]
        elif _is_list_of_trees(value):
            for item in value:
                shown += [f"{pad}{name}:", *lines(item, indent + 1)]
        elif value is not None:
            shown.append(f"{pad}{name}: {_short(value)}")
    return shown


def _is_list_of_trees(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(set(value)) > 4:
        return f"{value[0]:,} ... {value[-1]:,} ({len(value)} layers, {sum(value):,} in all)"
    if isinstance(value, tuple):
        return ", ".join(f"{item:,}" for item in dict.fromkeys(value)) + f" ({len(value)} layers)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
