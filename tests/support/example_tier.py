"""The code of docs/tiers.md: a tier, and its test class."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tiers.md"
MODULE = "kvstore_sqlite"


def blocks(language: str) -> list[str]:
    """The page's fenced blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def install(site: Path, name: str, entry: str, code: str | None = None) -> None:
    """Put an installed package there, with one entry point and perhaps a module of its name."""
    if code is not None:
        (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry)


def install_example(site: Path) -> None:
    """The package of docs/tiers.md, as pip would install it."""
    (entry,) = (block for block in blocks("toml") if "kvstore.tiers" in block)
    sections = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", entry).replace('"', "")
    install(site, MODULE, sections, blocks("python")[0])


def load_test() -> type:
    """Run both blocks as the modules they stand for, and return the test class."""
    tier, test = blocks("python")
    sys.modules[MODULE] = _run(MODULE, tier)
    try:
        found: type = _run(f"test_{MODULE}", test).TestSqliteTier
    finally:
        del sys.modules[MODULE]
    return found


def _run(name: str, code: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(code, f"{PAGE.name}:{name}", "exec"), module.__dict__)
    return module
