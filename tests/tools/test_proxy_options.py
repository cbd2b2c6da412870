"""Options that ``kvstore proxy`` accepts, and options that it refuses before it starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")

Run = Callable[..., Any]


def test_checked(run_json: Run) -> None:
    code, report = run_json("proxy", *ENGINES, "--decode-kv", "kvs://[::1]:7", "--check")
    assert code == 0
    assert report == {
        "prefill": ["http://127.0.0.1:1"],
        "decode": ["http://127.0.0.1:2"],
        "decode_kv": ["kvs://[::1]:7"],
        "url": "http://127.0.0.1:8080",
        "status": "checked",
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--prefill", "127.0.0.1:8000"), "--prefill is '127.0.0.1:8000': it must be http://HOST:PORT"),
        (("--decode", "http://x/v1"), "nothing behind it"),
        (("--decode", "http://x:99999"), "it must be http://HOST:PORT"),
        (("--decode", "http://127.0.0.1:2/"), "names an engine twice"),
        (("--decode-kv", "http://x:1"), "it must be kvs://HOST:PORT"),
        (("--decode-kv", "kvs://x"), "it must be kvs://HOST:PORT"),
        (("--decode-kv", "kvs://x:0"), "it must be kvs://HOST:PORT"),
        (("--decode-kv", "kvs://x:7,"), "or a port for each prefill worker"),
        (("--decode-kv", "kvs://u@x:7"), "it must be kvs://HOST:PORT"),
        (("--decode-kv", "kvs://x:1", "--decode-kv", "kvs://x:2"), "given 2 times and --decode 1 times"),
        (("--bidirectional",), "needs --decode-kv"),
        (("--first-token",), "needs --decode-kv"),
        (("--host", "0.0.0.0"), "give --api-key-file too"),
        (("--api-key-file", "nowhere"), "cannot be read"),
        (("--max-bodies-mb", "8"), "less than one body may have"),
        (("--engines", "nowhere"), "give either it, or --prefill, --decode and --decode-kv"),
    ],
)
def test_wrong(run: Run, wrong: tuple[str, ...], message: str) -> None:
    result = run("proxy", *ENGINES, *wrong, "--check")
    assert result.exit_code == 2
    assert message in result.stderr


def test_engines_in_a_file(run: Run, run_json: Run, tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("decode: [{url: http://127.0.0.1:2, kv: 'kvs://a:1'}, {url: http://127.0.0.1:3}]", encoding="utf-8")
    code, report = run_json("proxy", "--engines", file, "--check")
    assert code == 0
    assert (report["prefill"], report["decode_kv"]) == ([], ["kvs://a:1"])
    assert report["decode"] == ["http://127.0.0.1:2", "http://127.0.0.1:3"]
    file.write_text("decode: []", encoding="utf-8")
    result = run("proxy", "--engines", file, "--check")
    assert result.exit_code == 2
    assert "decode: List should have at least 1" in result.stderr
    assert "name at least one engine with --prefill" in run("proxy", "--check").stderr


def test_keys_in_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a-secret-of-mine\n", encoding="utf-8")
    beyond = ("proxy", *ENGINES, "--host", "0.0.0.0", "--check", "--api-key-file", file)
    file.chmod(0o644)
    assert "chmod 600" in run(*beyond).stderr
    file.chmod(0o600)
    assert run(*beyond).exit_code == 0
    for content in ("", "short", "with a space in it", "k\u00e4y-k\u00e4y-k\u00e4y"):
        file.write_text(content, encoding="utf-8")
        assert "holds no API key" in run(*beyond).stderr


def test_a_port_that_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("proxy", *ENGINES, "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "choose another --port" in result.stderr


def test_without_its_libraries() -> None:
    script = f"""
import sys
sys.modules["uvicorn"] = None
from kvstore.tools.cli import app
app({["proxy", *ENGINES]!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "uvicorn is not installed: pip install 'vllm-kvstore[proxy]'" in done.stderr
