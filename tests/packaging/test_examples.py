"""Files and settings for other programs on pages: they can be read, and are right."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools import warm
from kvstore.tools.dev.pages.stand_ins import needs_vllm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
SHOWN = [*PAGES, *sorted((ROOT / "config/examples").glob("*.yaml")), *sorted((ROOT / "deploy").rglob("*.yaml"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *kinds: str) -> list[str]:
    """Return the fenced blocks of these kinds, in order."""
    return [body for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def named(page: Path) -> str:
    return page.name


def test_warm_takes_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make pages`` runs it with a real model; all other Python of pages is run by test_transcripts.py."""
    calls: list[tuple[Any, ...]] = []

    def warmed(*arguments: Any, **options: Any) -> warm.WarmReport:
        inspect.signature(real).bind(*arguments, **options)
        calls.append(arguments)
        return warm.WarmReport()

    real = warm.warm
    monkeypatch.setattr(warm, "warm", warmed)
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for body in filter(needs_vllm, blocks(page, "python")):
            exec(compile(body, str(page), "exec"), {"__name__": page.stem})
    assert calls


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a text, and those within it."""
    decoder = json.JSONDecoder()
    begin = text.find("{")
    while begin >= 0:
        try:
            found, _ = decoder.raw_decode(text, begin)
        except ValueError:
            pass
        else:
            yield found
        begin = text.find("{", begin + 1)


def connectors(text: str) -> list[dict[str, Any]]:
    """Return the settings of our connector anywhere in a text."""
    return [tree for tree in objects(text) if tree.get("kv_connector") == "KVStoreConnector"]


def test_there_are_connectors() -> None:
    assert sum(len(connectors(page.read_text(encoding="utf-8"))) for page in SHOWN) >= 12


@pytest.mark.parametrize("page", SHOWN, ids=named)
def test_every_connector_computes_what_cannot_be_loaded(page: Path) -> None:
    """vLLM refuses to start with our connector without this policy, and only with it a failed load costs no request."""
    for tree in connectors(page.read_text(encoding="utf-8")):
        assert tree.get("kv_load_failure_policy") == "recompute", f"{page.name}: {tree}"
        assert tree.get("kv_role") in {"kv_both", "kv_producer", "kv_consumer"}, f"{page.name}: {tree}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_json_is_json(page: Path) -> None:
    for body in blocks(page, "json"):
        try:
            json.loads(body)
        except ValueError:
            for line in body.splitlines():  # of a .jsonl file
                json.loads(line)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_for_other_programs_can_be_read(page: Path) -> None:
    for body in blocks(page, "toml"):
        tomllib.loads(body)
