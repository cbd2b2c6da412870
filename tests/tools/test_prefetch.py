"""``kvstore prefetch`` sends requests as users do. Real vLLM: tests/e2e/test_warm.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.answers import Answers, answering

from kvstore.model.errors import ConfigError
from kvstore.tools.prefetch import prefetch
from kvstore.tools.vllmclient import TOKENS_LOADED
from kvstore.tools.warm.prompts import read_prompts


class Server(Answers):
    """Server that answers as vLLM does, loads 7 tokens for each prompt, and refuses those that say "no"."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        loaded = sum("no" not in json.dumps(body) for _, body in self.asked) * 7
        self.answer(200, f"# TYPE {TOKENS_LOADED} counter\n{TOKENS_LOADED} {loaded}\n".encode())

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        self.keys.append(self.headers["Authorization"])
        if "no" in json.dumps(body):
            self.answer(400, b"{}")
        else:
            self.answer(200, json.dumps({"usage": {"prompt_tokens": 10}}).encode())


@pytest.fixture
def url() -> Iterator[str]:
    Server.asked.clear()
    Server.keys.clear()
    with answering(Server) as address:
        yield address


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines: list[object] = [
        "a text",
        [1, 2],
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}], "cache_salt": "own"},
        "no",
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\nnot json\n", encoding="utf-8")
    return path


def test_every_prompt_is_asked_for_one_token(url: str, file: Path) -> None:
    report = prefetch(url, "llama", read_prompts(file), salt="all", api_key="key")
    assert (report.prompts, report.tokens, report.tokens_loaded) == (3, 30, 21)
    assert [item.where for item in report.refused] == [f"{file}, line 4", f"{file}, line 5"]
    common = {"model": "llama", "max_tokens": 1, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"a": 1}], "add_generation_prompt": False}
    assert Server.asked[:3] == [
        ("/v1/completions", {**common, "cache_salt": "all", "prompt": "a text"}),
        ("/v1/completions", {**common, "cache_salt": "all", "prompt": [1, 2]}),
        ("/v1/chat/completions", {**common, "cache_salt": "own", **chat}),
    ]
    assert set(Server.keys) == {"Bearer key"}


def test_stopped(url: str, file: Path) -> None:
    report = prefetch(url, "llama", read_prompts(file), should_stop=lambda: len(Server.asked) == 2)
    assert (report.prompts, report.interrupted, report.is_complete) == (2, True, False)


def test_no_server(file: Path) -> None:
    with pytest.raises(ConfigError, match="is vLLM there"):
        prefetch("http://127.0.0.1:9", "llama", read_prompts(file))


def test_command(url: str, file: Path, run: Any, run_json: Any) -> None:
    code, tree = run_json("prefetch", "--server", url, "--model", "llama", "--prompts", file)
    assert (code, tree["prompts"], len(tree["refused"])) == (1, 3, 2)
    file.write_text('"good"\n', encoding="utf-8")
    result = run("prefetch", "--server", url, "--model", "llama", "--prompts", file)
    assert result.exit_code == 0
    assert "1 prompts of 10 tokens; 7 tokens loaded" in result.stdout
    assert run("prefetch", "--server", "http://127.0.0.1:9", "--model", "llama", "--prompts", file).exit_code == 2
