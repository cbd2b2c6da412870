"""Imports go in one direction only, and forbidden constructs do not occur in the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Rooms, from the ground up: a module imports its own room and rooms on the lines above it, and there is no circle. A
# room is a folder or a module in kvstore/; the adapter and the tools are divided once more.
ROOMS = (
    ("model",),
    ("policies", "format", "paged", "protocol", "channels"),
    ("index", "memory"),
    ("tiers",),
    ("config", "handover", "server", "transfer"),
    ("engine", "testing"),
    ("ops",),
    ("adapters.vllm.telemetry", "adapters.vllm.identity", "adapters.vllm.refusals", "adapters.vllm.flag"),
    ("adapters.vllm.requests",),
    ("adapters.vllm.plan",),
    ("adapters.vllm.scheduler", "adapters.vllm.worker"),
    ("adapters.vllm.glue",),
    ("adapters.vllm.connector", "adapters.vllm.plugin"),
    ("adapters.vllm.offline",),
    (
        "tools.console",
        "tools.ends",
        "tools.figures",
        "tools.inspection",
        "tools.locks",
        "tools.modelgroups",
        "tools.yamlfile",
    ),
    (
        "tools.models",
        "tools.processes",
        "tools.recipes",
        "tools.replay",
        "tools.reportpage",
        "tools.serve",
        "tools.workers",
    ),
    ("tools.calc", "tools.configs", "tools.interrupts", "tools.modelconfig", "tools.vllmclient", "tools.vllmflags"),
    ("tools.vllmserver",),
    (
        "tools.demo",
        "tools.doctor",
        "tools.flags",
        "tools.live",
        "tools.probe",
        "tools.proxy",
        "tools.sweeping",
        "tools.verify",
        "tools.why",
    ),
    ("tools.simulate", "tools.storecosts", "tools.sweeping"),
    ("tools.warm",),
    ("tools.bench", "tools.pack", "tools.prefetch"),
    ("tools.outside", "tools.prove"),
    ("tools.commands",),
    ("tools.cli",),
    ("tools.dev",),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
HOUSES = (["adapters", "vllm"], ["adapters"], ["tools"])  # packages that only hold rooms
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save"}


class Module(NamedTuple):
    name: str
    path: Path

    @property
    def room(self) -> str:
        """Room of the module, as ``ROOMS`` names it; empty for packages that only hold rooms."""
        parts = self.name.split(".")[1:]
        for house in HOUSES:
            if parts[: len(house)] == house:
                return ".".join(parts[: len(house) + 1]) if len(parts) > len(house) else ""
        return ".".join(parts[:1])


def all_modules() -> list[Module]:
    folders = {"kvstore": ROOT / "kvstore", **{f"kvstore.{n}": ROOT / n for n in ("adapters", "config", "tools")}}
    found = []
    for prefix, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if prefix == "kvstore" and parts[0] in {"adapters", "config", "tools"}:
                continue  # the links; their targets are found under their own names
            name = ".".join((prefix, *parts)).removesuffix(".__init__")
            found.append(Module(name, path))
    return found


MODULES = all_modules()
NAMES = {module.name for module in MODULES}
BUT_FOR_SCRIPTS = [module for module in MODULES if module.room != "tools.dev"]


@cache
def nodes_of(module: Module) -> list[ast.AST]:
    """Return all nodes of its syntax tree."""
    return list(ast.walk(ast.parse(module.path.read_text(encoding="utf-8"))))


@cache
def imported_names(module: Module) -> set[str]:
    """Return the dotted names of all modules it imports anywhere, also inside functions and for type checking."""
    names: set[str] = set()
    for node in nodes_of(module):
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
    assert {"kvstore.model.keys", "kvstore.tools.cli", "kvstore.config", "kvstore.adapters"} <= NAMES
    assert LEVELS.keys() == {module.room for module in MODULES} - {""}


def test_arrows_point_to_rooms_above() -> None:
    """A new room needs its place in ``ROOMS``."""
    wrong = []
    for module in MODULES:
        for name in ours(imported_names(module)) - {"kvstore"} if module.room else ():
            room = Module(name, module.path).room
            if room != module.room and LEVELS[room] >= LEVELS[module.room]:
                wrong.append(f"{module.name} imports {name}")
    assert not wrong


def test_no_circle() -> None:
    sorter = TopologicalSorter({module.name: ours(imported_names(module)) - {module.name} for module in MODULES})
    sorter.prepare()  # raises CycleError, which names the circle


def importers_of(roots: set[str]) -> list[str]:
    """Return the names of modules that import any of these packages, scripts left out."""
    return [m.name for m in BUT_FOR_SCRIPTS if roots & {name.split(".")[0] for name in imported_names(m)}]


def test_only_adapters_import_vllm() -> None:
    assert not [name for name in importers_of({"vllm"}) if not name.startswith("kvstore.adapters")]


def test_nothing_that_runs_data_as_code() -> None:
    assert not importers_of(FORBIDDEN_MODULES)
    calls = ((m, node) for m in BUT_FOR_SCRIPTS for node in nodes_of(m) if isinstance(node, ast.Call))
    found = [f"{m.path}:{node.lineno}" for m, node in calls if ast.unparse(node.func) in FORBIDDEN_CALLS]
    assert not found


def test_keys_need_neither_torch_nor_vllm() -> None:
    code = "import sys, kvstore, kvstore.model.keys; print(sorted({'torch', 'vllm'} & sys.modules.keys()))"
    assert python(code) == "[]"


def test_the_engine_needs_little_besides_torch() -> None:
    """Importing it costs a process that has torch next to nothing; `kvstore bench` measures how much."""
    imports = "import sys, torch; known = set(sys.modules); import kvstore.engine.engine, kvstore.paged.binding; "
    found = python(imports + "print(*sorted({name.split('.')[0] for name in set(sys.modules) - known}))").split()
    assert set(found) - set(sys.stdlib_module_names) <= {"kvstore", "numpy", "xxhash"}


def test_the_package_itself_imports_nothing() -> None:
    found = python("import sys; known = set(sys.modules); import kvstore; print(*(set(sys.modules) - known))").split()
    assert found == ["kvstore"]


def test_every_name_of_the_package_is_there() -> None:
    code = (
        "import kvstore; print(*(f'{getattr(kvstore, name).__module__}.{name}' for name in kvstore.__all__));"
        "print({*kvstore.__all__, '__version__'} <= set(dir(kvstore)), hasattr(kvstore, 'CacheEngin'));"
        "from kvstore import *; print(CacheEngine.__name__, ConfigError.__name__)"
    )
    names, told, starred = python(code).splitlines()
    defined = ast.parse((ROOT / "kvstore/model/errors.py").read_text(encoding="utf-8")).body
    errors = {f"kvstore.model.errors.{node.name}" for node in defined if isinstance(node, ast.ClassDef)}
    assert set(names.split()) == errors | {
        "kvstore.engine.engine.CacheEngine",
        "kvstore.model.keys.KeyExtras",
        "kvstore.model.keys.Namespace",
        "kvstore.engine.options.EngineOptions",
        "kvstore.engine.options.RemoteOptions",
        "kvstore.paged.binding.bind_paged_kv",
    }
    assert (told, starred) == ("True False", "CacheEngine ConfigError")


def test_the_options_need_no_torch() -> None:
    code = "import sys; from kvstore import EngineOptions, Namespace, ConfigError; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_the_command_starts_without_heavy_imports() -> None:
    code = "import sys, kvstore.tools.cli; print(sorted({'torch', 'vllm', 'numpy'} & sys.modules.keys()))"
    assert python(code) == "[]"


def test_no_module_has_two_names() -> None:
    code = (
        "import sys, kvstore.adapters, kvstore.config, kvstore.tools.cli, kvstore.tools.models, kvstore.engine.engine;"
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
    """Return the files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listing.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]
