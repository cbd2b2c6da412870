"""``make bench-outside`` with real vLLM and its own load generator, over a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.tools.models import TINY
from kvstore.tools.outside import __main__ as command
from kvstore.tools.outside import engines, run
from kvstore.tools.outside.engines import AGAIN, KVSTORE, PLAIN

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]


def test_vllm_bench_finds_in_kvstore_what_vllm_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (engines, run):
        monkeypatch.setattr(module, "SHAPE", TINY)
    monkeypatch.setattr(engines, "ENGINES", (PLAIN, KVSTORE))
    monkeypatch.setattr(run, "ENGINES", (PLAIN, KVSTORE))
    options = ["--only", "vllm-bench-prefix", "--only", "lmbench", "--rounds", "1", "--share", "0.14", "--json"]
    assert command.main(["--folder", str(tmp_path), *options]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["outputs"]["different"] == 0
    assert tree["outputs"]["compared"] == 2 * 12
    assert tree["outputs"]["loaded_tokens"] >= 6 * 1280
    plain, ours = tree["rows"]
    assert (plain["engine"], ours["engine"]) == (PLAIN, KVSTORE)
    assert (plain["requests"], ours["requests"], ours["failed"]) == (16, 16, 0)
    assert plain["loaded"] == 0
    assert ours["own_hits"] + ours["loaded"] > plain["own_hits"] + 0.2
    assert "lmbenchmark" in tree["skipped"]
    assert AGAIN not in (tmp_path / "share-0.14" / "report.html").read_text()
