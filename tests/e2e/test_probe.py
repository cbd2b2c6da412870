"""Tests of the output of a real ``vllm serve``: a hit in one command, one block at start, mistakes in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.vllm_engine import whole_blocks

from kvstore.tools.demo.server import VllmServer
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

TOKENS = 1000


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log at the level that users see, and not at that of the tests."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")


def config_file(folder: Path, text: str = "") -> Path:
    file = folder / "kvstore.yaml"
    text = text or f"local_disk: {folder}/kv\nmax_local_disk_size: 1\nlog_request_sample: 1\n"
    file.write_text(f"max_local_cpu_size: 0.25\n{text}", encoding="utf-8")
    return file


def probe(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit status, and the JSON that it prints."""
    command = [sys.executable, "-m", "kvstore.tools.cli", "probe", "--json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_probe_and_what_the_log_says(tiny_model: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path)
    with VllmServer(tiny_model, config, tmp_path / "serve.log", drains=False) as server:
        for _ in range(2):
            code, report = probe("--url", server.url, "--tokens", TOKENS)
            assert (code, report["found_tokens"]) == (0, whole_blocks(TOKENS)), report
            assert sum(report["tiers"].values()) == whole_blocks(TOKENS)
        code, report = probe("--url", server.url, "--tokens", 9)
        assert (code, "nothing of the prompt was stored" in report["reason"]) == (1, True)
        request = {"model": str(tiny_model), "prompt": "w1 w2", "max_tokens": 1, "kv_transfer_params": {}}
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
            request["kv_transfer_params"] = {"kvstore.skip_sav": True}
            answer = client.post("/v1/completions", json=request).raise_for_status().json()
        assert "kvstore.skip_save" in answer["kv_transfer_params"]["kvstore_problem"]
        wrong = "vllm:kvstore_request_field_errors_total"
        assert read_counter(server.url, wrong, {"field": "skip_save"}) == 1 == read_counter(server.url, wrong)
    log = (tmp_path / "serve.log").read_text(encoding="utf-8")
    for said in (
        f"configuration: file {config}",
        f"disk {tmp_path}/kv: at most 1.00 GiB, 0 chunks found",
        "namespace ",
    ):
        assert log.count(f"kvstore: {said}") == 1, said
    assert f"hit {whole_blocks(TOKENS)} (memory {whole_blocks(TOKENS)}, disk 0, remote 0) in " in log


@pytest.mark.sweep
def test_a_mistake_is_the_last_line(tiny_model: Path, tmp_path: Path) -> None:
    """The mistake is reported before the model is loaded. tests/adapters/test_plugin.py has other mistakes."""
    server = VllmServer(tiny_model, config_file(tmp_path, "max_local_cpu_sise: 1"), tmp_path / "log")
    environment = os.environ | {"KVSTORE_CONFIG_FILE": str(server.config)}
    done = subprocess.run(server.command(), env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    words = "unknown key; did you mean max_local_cpu_size?"
    assert done.stderr.splitlines()[-1].startswith("kvstore: error: ")
    assert done.stderr.splitlines()[-1].endswith(words)
    said = done.stdout + done.stderr
    assert said.count(words) == 1
    assert "Traceback" not in said
    assert "Resolved architecture" in said, "vLLM says what it does"
    assert "Starting to load model" not in said
