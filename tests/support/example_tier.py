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
