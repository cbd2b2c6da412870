"""Imports point one way, and what may not be in the code is not in it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A module may import modules of lower levels only. A new module of the engine gets its line here.
LEVELS = {
    "kvstore": 0,
    "kvstore.errors": 0,
    "kvstore.contexts": 0,
    "kvstore.versions": 0,
    "kvstore.wholeio": 0,
    "kvstore.hostlimits": 1,
    "kvstore.loopback": 1,
    "kvstore.keys": 1,
    "kvstore.throttle": 1,
    "kvstore.copiers": 1,
    "kvstore.tasks": 1,
    "kvstore.layout": 1,
    "kvstore.chunkfile": 2,
    "kvstore.codecs.base": 1,
    "kvstore.codecs.int8": 2,
    "kvstore.codecs.lossless": 2,
    "kvstore.codecs": 3,
    "kvstore.policies.base": 2,
    "kvstore.policies.survival": 2,
    "kvstore.policies.units": 2,
    "kvstore.policies.adaptive": 3,
    "kvstore.policies.arc": 3,
    "kvstore.policies.lfu": 3,
    "kvstore.policies.lru": 3,
    "kvstore.policies.s3fifo": 3,
    "kvstore.policies": 4,
    "kvstore.simulation": 5,
    "kvstore.traces": 2,
    "kvstore.pinning": 2,
    "kvstore.tiers.base": 2,
    "kvstore.coding": 3,
    "kvstore.images": 4,
    "kvstore.packs": 5,
    "kvstore.redis_shelf": 6,
    "kvstore.shelf": 5,
    "kvstore.tiers": 3,
    "kvstore.mapped": 1,
    "kvstore.keyfiles": 1,
    "kvstore.pieces": 1,
    "kvstore.runs": 1,
    "kvstore.wire": 3,
    "kvstore.tiers._server_url": 3,
    "kvstore.tiers._server_link": 4,
    "kvstore.tiers._server_links": 5,
    "kvstore.tiers._server_moves": 6,
    "kvstore.tiers.server": 7,
    "kvstore.transports": 0,
    "kvstore.transports.base": 3,
    "kvstore.transports.tcp": 7,
    "kvstore.server": 0,
    "kvstore.server.pool": 4,
    "kvstore.server.spaces": 5,
    "kvstore.server.pins": 6,
    "kvstore.server.stock": 7,
    "kvstore.server.sessions": 8,
    "kvstore.server.watch": 9,
    "kvstore.server.intake": 1,
    "kvstore.server.turns": 1,
    "kvstore.server.rack": 9,
    "kvstore.server.shelves": 10,
    "kvstore.server.doors": 4,
    "kvstore.server.locks": 4,
    "kvstore.server.options": 10,
    "kvstore.server.reports": 13,
    "kvstore.server.freight": 9,
    "kvstore.server.orders": 10,
    "kvstore.server.places": 11,
    "kvstore.server.service": 12,
    "kvstore.server.hub": 14,
    "kvstore.server.operator": 5,
    "kvstore.server.owner": 4,
    "kvstore.server.embedded": 15,
    "kvstore.plans": 3,
    "kvstore.deadlines": 0,
    "kvstore.leases": 2,
    "kvstore.admin": 2,
    "kvstore.admin_http": 3,
    "kvstore.departed": 4,
    "kvstore.metrics": 4,
    "kvstore.remote": 3,
    "kvstore.directory": 9,
    "kvstore.questions": 3,
    "kvstore.index": 5,
    "kvstore.deviation": 3,
    "kvstore.staging": 1,
    "kvstore.pages": 3,
    "kvstore.slabs": 3,
    "kvstore.tiers._folder": 3,
    "kvstore.tiers._scratch": 3,
    "kvstore.tiers._shared_reads": 3,
    "kvstore.tiers._slots": 3,
    "kvstore.tiers._streams": 3,
    "kvstore.wrappers.base": 3,
    "kvstore.device": 4,
    "kvstore.tiers.cpu": 4,
    "kvstore.tiers.gpu": 4,
    "kvstore.tiers._chunkio": 4,
    "kvstore.tiers._codedio": 5,
    "kvstore.tiers._space": 4,
    "kvstore.tiers._survey": 4,
    "kvstore.tiers._redis_ledger": 3,
    "kvstore.tiers._redis_url": 3,
    "kvstore.tiers._redis_wire": 3,
    "kvstore.tiers._redis_chunk": 4,
    "kvstore.tiers._redis_nodes": 4,
    "kvstore.tiers.disk": 6,
    "kvstore.tiers.pack": 6,
    "kvstore.tiers._redis_calls": 5,
    "kvstore.tiers._redis_coded": 5,
    "kvstore.tiers._redis_sweep": 6,
    "kvstore.tiers.redis": 7,
    "kvstore.tiers.striped": 7,
    "kvstore.tiers._batches": 1,
    "kvstore.tiers.peers": 7,
    "kvstore.wrappers._owed": 3,
    "kvstore.wrappers.breaker": 4,
    "kvstore.wrappers.crew": 3,
    "kvstore.wrappers.deadline": 4,
    "kvstore.wrappers.faults": 4,
    "kvstore.wrappers.latency": 4,
    "kvstore.wrappers.stats": 4,
    "kvstore.wrappers": 8,
    "kvstore.binding": 5,
    "kvstore.errands": 4,
    "kvstore.flushed": 0,
    "kvstore.lanes": 5,
    "kvstore.hot": 5,
    "kvstore.borrowing": 6,
    "kvstore.movers": 7,
    "kvstore.pusher": 4,
    "kvstore.opening": 10,
    "kvstore.engine": 11,
    "kvstore.layerwise": 8,
    "kvstore.requests": 4,
    "kvstore.meters": 11,
    "kvstore.testing.harness": 6,
    "kvstore.testing.bounds": 7,
    "kvstore.testing.buffers": 7,
    "kvstore.testing.contents": 7,
    "kvstore.testing.damage": 7,
    "kvstore.testing.layers": 7,
    "kvstore.testing.lending": 7,
    "kvstore.testing.machine": 7,
    "kvstore.testing.policies": 7,
    "kvstore.testing.policy_machine": 6,
    "kvstore.testing.restart": 7,
    "kvstore.testing.threads": 7,
    "kvstore.testing.conformance": 8,
    "kvstore.testing": 9,
}
# What the packages around the engine may import of this project, besides themselves.
OUTER = {
    "kvstore.config": ("kvstore",),
    "kvstore.adapters": ("kvstore", "kvstore.config"),
    "kvstore.tools": ("kvstore", "kvstore.config", "kvstore.adapters"),
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save"}


class Module(NamedTuple):
    name: str
    path: Path

    @property
    def package(self) -> str:
        """The outer package it belongs to, or ``kvstore`` for the engine."""
        return next((outer for outer in OUTER if self.name == outer or self.name.startswith(f"{outer}.")), "kvstore")


def all_modules() -> list[Module]:
    folders = {"kvstore": ROOT / "kvstore", **{f"kvstore.{n}": ROOT / n for n in ("adapters", "config", "tools")}}
    found = []
    for prefix, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if prefix == "kvstore" and parts[0] in {"adapters", "config", "tools"}:
                continue  # the links; their targets come under their own names
            if parts[0] == "dev":
                continue  # scripts, not a package
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            found.append(Module(name, path))
    return found


MODULES = all_modules()
NAMES = {module.name for module in MODULES}
by_name = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def imported_names(module: Module) -> set[str]:
    """Dotted names of all modules it imports anywhere, also inside functions and for type checking."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in NAMES else node.module)
    return names


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "kvstore"}


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_there_are_modules() -> None:
    assert {"kvstore.keys", "kvstore.tools.cli", "kvstore.config", "kvstore.adapters"} <= NAMES


@by_name
def test_arrows_inside_the_engine(module: Module) -> None:
    if module.package != "kvstore":
        return
    assert module.name in LEVELS, f"{module.name} is new: give it a level in {Path(__file__).name}"
    for name in ours(imported_names(module)):
        assert name in LEVELS, f"{module.name} imports {name}, which is no module of the engine"
        assert LEVELS[name] < LEVELS[module.name], f"{module.name} imports {name}, which is not below it"


@by_name
def test_arrows_between_packages(module: Module) -> None:
    if module.package == "kvstore":
        return
    allowed = {*OUTER[module.package], module.package}
    for name in ours(imported_names(module)):
        target = Module(name, module.path).package
        assert target in allowed, f"{module.name} imports {name}: {module.package} may import {sorted(allowed)} only"


@by_name
def test_only_adapters_import_vllm(module: Module) -> None:
    if module.package != "kvstore.adapters":
        assert not {name for name in imported_names(module) if name.split(".")[0] == "vllm"}


@by_name
def test_nothing_that_runs_data_as_code(module: Module) -> None:
    imported = {name.split(".")[0] for name in imported_names(module)}
    assert not imported & FORBIDDEN_MODULES
    for node in ast.walk(ast.parse(module.path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS, f"{module.path}:{node.lineno}"


def test_keys_need_neither_torch_nor_vllm() -> None:
    code = "import sys, kvstore, kvstore.keys; print(sorted({'torch', 'vllm'} & sys.modules.keys()))"
    assert python(code) == "[]"


def test_the_engine_needs_little_besides_torch() -> None:
    """So that importing it costs a process that has torch next to nothing; `kvstore bench` says how much."""
    imports = "import sys, torch; known = set(sys.modules); import kvstore.engine, kvstore.binding; "
    found = python(imports + "print(*sorted({name.split('.')[0] for name in set(sys.modules) - known}))").split()
    assert set(found) - set(sys.stdlib_module_names) <= {"kvstore", "numpy", "xxhash"}


def test_the_package_itself_imports_nothing() -> None:
    found = python("import sys; known = set(sys.modules); import kvstore; print(*(set(sys.modules) - known))").split()
    assert found == ["kvstore"]


def test_the_command_starts_without_heavy_imports() -> None:
    code = "import sys, kvstore.tools.cli; print(sorted({'torch', 'vllm', 'numpy'} & sys.modules.keys()))"
    assert python(code) == "[]"


def test_no_module_has_two_names() -> None:
    code = (
        "import sys, kvstore.adapters, kvstore.config, kvstore.tools.cli, kvstore.tools.models, kvstore.engine;"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'adapters', 'config', 'tools'}))"
    )
    assert python(code) == "[]"


def test_no_file_names_a_machine() -> None:
    words = [f"/{folder}/" for folder in ("work", "root", "home", "Users")]
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), start=1)
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in lines if any(word in line for word in words)]
    assert not found


def tracked_files() -> list[Path]:
    """Files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]
