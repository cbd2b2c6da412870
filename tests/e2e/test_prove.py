"""``kvstore prove`` with real vLLM: a proof of every tier, and a tier that lies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.example_tier import install, install_example
from typer.testing import CliRunner

from kvstore.tools.cli import app

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager")
LIAR = """
from kvstore.tiers import payload_view
from kvstore_sqlite import SqliteTier

class LyingTier(SqliteTier):
    name = "lying"

    def get(self, transfers):
        outcomes = super().get(transfers)
        for transfer in transfers:
            payload_view(self._layout, transfer)[4003] ^= 0x40
        return outcomes
"""
ANNOUNCED = "[kvstore.tiers]\nlying = kvstore_lying:LyingTier\n[kvstore.schemes]\nlying = kvstore_lying:LyingTier\n"
OWN = ["plain", "plain-again", "plain-together", "own-hit", "own-hit-again"]

Prove = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def prove(tiny_model: Path, tmp_path: Path) -> Prove:
    """Return a function that runs the command, and returns the exit code and the certificate."""

    def run(config: str, *options: str) -> tuple[int, dict[str, Any]]:
        (tmp_path / "kvstore.yaml").write_text(f"max_local_cpu_size: 0.25\n{config}")
        places = ["--config", str(tmp_path / "kvstore.yaml"), "--out", str(tmp_path / "proof")]
        result = CliRunner().invoke(app, ["prove", "--json", *places, *options, "--", str(tiny_model), *FLAGS])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        sealed = json.loads(result.stdout)
        assert json.loads((tmp_path / "proof" / "certificate.json").read_text()) == sealed
        return result.exit_code, sealed["certificate"]

    return run


def disk(folder: Path) -> str:
    return f"local_disk: {folder}/kv/disk\nmax_local_disk_size: 1\n"


def verdicts(certificate: dict[str, Any]) -> dict[str, str]:
    return {one["situation"]: one["verdict"] for one in certificate["situations"]}


@pytest.mark.sweep
def test_a_tier_that_changes_a_byte_is_caught(prove: Prove, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is proven in the same run, and what was stored is gone afterwards."""
    (tmp_path / "kv").mkdir()
    site = tmp_path / "site"
    site.mkdir()
    install_example(site)
    install(site, "kvstore_lying", ANNOUNCED, LIAR)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "sqlite").mkdir()
    code, found = prove(
        f"{disk(tmp_path)}remote_url: lying://{tmp_path}/sqlite\n", "--only", "disk", "--only", "remote"
    )
    assert (code, found["verdict"]) == (1, "differs")
    expected = dict.fromkeys([*OWN, "cold", "disk"], "proven") | {"remote": "differs"}
    assert verdicts(found) == expected, found["situations"]
    by_name = {one["situation"]: one for one in found["situations"]}
    assert by_name["disk"]["hit_tokens"] == {"disk": by_name["disk"]["cached_tokens"]}
    assert by_name["disk"]["outputs_sha256"] == by_name["plain"]["outputs_sha256"]
    assert by_name["disk"]["cached_tokens"] == by_name["own-hit"]["cached_tokens"]
    assert not list((tmp_path / "kv").iterdir()), "the folder of the proof was beside the user's, and is gone"


@pytest.mark.sweep
def test_every_tier_is_proven(prove: Prove, tmp_path: Path) -> None:
    """A file is damaged, and a server killed; a key signs the certificate."""
    (tmp_path / "kv").mkdir()
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    from support.redis_server import RedisServer, running

    server = RedisServer(tmp_path / "redis")
    with running(server):
        code, found = prove(f"{disk(tmp_path)}remote_url: redis://127.0.0.1:{server.port}\n")
        left = server.admin().keys("*")
    assert (code, set(verdicts(found).values())) == (0, {"proven"}), found["situations"]
    assert list(verdicts(found)) == [*OWN, "cold", "memory", "disk", "damaged-disk", "remote", "killed-server"]
    assert [name for name in left if not name.endswith(b":epoch")] == [], "nothing of the proof stays in Redis"
    assert not list((tmp_path / "kv").iterdir())
