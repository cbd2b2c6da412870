"""The code of docs/tiers.md, a tier and its test class, and of docs/policies.md, a policy and its test class."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODULE = "kvstore_sqlite"


def blocks(page: str, language: str) -> list[str]:
    """Return a page's fenced blocks in a language, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def load_policy_test() -> type:
    """Run the page's only block, and return the test class."""
    (code,) = blocks("policies.md", "python")
    found: type = _run("test_my_policy", code).TestMyPolicy
    return found


def install(site: Path, name: str, entry: str, code: str | None = None) -> None:
    """Install a package there, with one entry point and perhaps a module of its name."""
    if code is not None:
        (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry)


def install_example(site: Path) -> None:
    """Install the package of docs/tiers.md as pip would."""
    (entry,) = (block for block in blocks("tiers.md", "toml") if "kvstore.tiers" in block)
    sections = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", entry).replace('"', "")
    install(site, MODULE, sections, blocks("tiers.md", "python")[0])


def load_test() -> type:
    """Run both blocks as the modules that they show, and return the test class."""
    tier, test = blocks("tiers.md", "python")
    sys.modules[MODULE] = _run(MODULE, tier)
    try:
        found: type = _run(f"test_{MODULE}", test).TestSqliteTier
    finally:
        del sys.modules[MODULE]
    return found


def _run(name: str, code: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(code, f"docs:{name}", "exec"), module.__dict__)
    return module
