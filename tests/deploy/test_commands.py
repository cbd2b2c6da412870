"""Commands that deploy/ shows, in its page and at the heads of its files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.chart import EXAMPLES, render
from typer.testing import CliRunner

from kvstore.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
SHOWN = [path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix in {".md", ".yaml", ".service", ""}]
PROGRAMS = "docker|helm|kubectl|kvstore|install"
COMMAND = re.compile(rf"^(?:\$|#  ) +((?:[A-Z_]+=\S+ )?(?:{PROGRAMS}|deploy/\S+) .*)$", re.MULTILINE)


def commands() -> list[list[str]]:
    texts = [path.read_text() for path in SHOWN if path.is_file()]
    return [shlex.split(line) for text in texts for line in COMMAND.findall(text)]


def test_there_are_commands() -> None:
    assert {words[0] for words in commands()} >= {"docker", "helm", "kubectl", "kvstore"}


def test_their_files_are_there() -> None:
    named = {word for words in commands() for word in words if word.startswith("deploy/")}
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_example_of_the_chart_is_installed_so() -> None:
    shown = [words for words in commands() if words[0] == "helm" and "deploy/chart/kvstore" in words]
    assert len(shown) >= 4
    for words in shown:
        assert words[1] in {"install", "upgrade"}
        assert words[2:7] == ["cache", "deploy/chart/kvstore", "--namespace", "vllm", "--values"]
        result = render(example=Path(words[7]).name)
        assert result.returncode == 0, result.stderr


def test_the_keys_that_the_examples_make_are_those_that_they_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "shared-pool.yaml").read_text()
    shown = [shlex.split(line) for line in COMMAND.findall(text)]
    for words in (words for words in shown if words[0] == "kvstore"):
        assert CliRunner().invoke(app, words[1:]).exit_code == 0, words
    made = {words[3] if words[2] == "configmap" else words[4]: words for words in shown if words[0] == "kubectl"}
    assert made.keys() == {"kvstore-server", "kvstore-clients", "kvstore-client"}
    for words in made.values():
        files = [Path(words[place + 1]) for place, word in enumerate(words) if word == "--from-file"]
        assert files
        assert all(file.is_file() for file in files)
    rendered = render(example="shared-pool.yaml").stdout
    assert "secret: {name: kvstore-server," in rendered
    assert "name: kvstore-clients}" in rendered
