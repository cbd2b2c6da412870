"""Reads the fields of vLLM's configuration, KV cache specs and quantization methods from its files.

The files are parsed, not imported, so those of a version that cannot be installed here can be read. To record them::

    python -m support.vllm_fields 0.32 FOLDER

with the folder that contains ``vllm``; without one, those of the installed vLLM are recorded.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

RECORDED: Final = Path(__file__).parents[1] / "adapters" / "vllm_fields.json"

CONFIGS: Final = frozenset(
    {
        "VllmConfig",
        "ModelConfig",
        "CacheConfig",
        "MultiModalConfig",
        "ParallelConfig",
        "LoRAConfig",
        "SpeculativeConfig",
        "LoadConfig",
        "AttentionConfig",
        "MambaConfig",
        "QuantizationConfigArgs",
        "QuantSpec",
    }
)
_GROUPS: Final = frozenset({"KVCacheGroupSpec", "KVCacheConfig"})
_INHERITS: Final = re.compile(r"^class \w+\([\w.]*Config\b", re.MULTILINE)
_NO_FIELDS: Final = ("ClassVar", "InitVar")

Fields = Mapping[str, list[str]]


def recorded() -> Mapping[str, Fields]:
    """Return the recorded fields by version and class."""
    found = json.loads(RECORDED.read_text())
    return {version: {name: text.split() for name, text in classes.items()} for version, classes in found.items()}


def installed() -> Path:
    """Return the folder of the vLLM that would be imported."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def fields_of(vllm: Path) -> Fields:
    """Return the fields of each class below this folder of vLLM's files, sorted."""
    found: dict[str, list[str]] = {}
    for path in sorted((vllm / "config").glob("*.py")):
        found.update({node.name: _declared(node) for node in _classes(path) if node.name in CONFIGS})
    specs = list(_classes(vllm / "v1" / "kv_cache_interface.py"))
    stored = _GROUPS | _heirs(specs, "KVCacheSpec")
    found.update({node.name: _declared(node) for node in specs if node.name in stored})
    methods = [node for path in sorted(vllm.rglob("*.py")) for node in _classes(path, _INHERITS)]
    base = list(_classes(vllm / "model_executor/layers/quantization/base_config.py"))
    kinds = _heirs([*base, *methods], "QuantizationConfig")
    found.update({node.name: _arguments(node) for node in [*base, *methods] if node.name in kinds})
    return {name: sorted(fields) for name, fields in sorted(found.items())}


def _classes(path: Path, where: re.Pattern[str] | None = None) -> Iterator[ast.ClassDef]:
    """Yield the classes of a module, if its text matches."""
    text = path.read_text()
    if where is None or where.search(text):
        yield from (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


def _heirs(nodes: list[ast.ClassDef], base: str) -> set[str]:
    """Return a class and all that inherit from it, by their names."""
    heirs, before = {base}, 0
    while len(heirs) > before:
        before = len(heirs)
        heirs |= {node.name for node in nodes if {ast.unparse(one).split(".")[-1] for one in node.bases} & heirs}
    return heirs


def _declared(node: ast.ClassDef) -> list[str]:
    """Return the fields of a dataclass without those of its parents."""
    declared = (part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name))
    return [
        part.target.id
        for part in declared
        if isinstance(part.target, ast.Name) and not ast.unparse(part.annotation).startswith(_NO_FIELDS)
    ]


def _arguments(node: ast.ClassDef) -> list[str]:
    """Return the arguments of a class's own constructor."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return [one.arg for one in (*part.args.args[1:], *part.args.kwonlyargs)]
    return []


def _record(version: str, vllm: Path) -> None:
    found = {name: {one: " ".join(fields) for one, fields in classes.items()} for name, classes in recorded().items()}
    found[version] = {name: " ".join(fields) for name, fields in fields_of(vllm).items()}
    RECORDED.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    _record(sys.argv[1], Path(sys.argv[2]) / "vllm" if len(sys.argv) > 2 else installed())
