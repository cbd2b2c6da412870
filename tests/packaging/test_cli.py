"""The command's interface: help with an example everywhere, JSON for programs, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvstore.tools.cli import app

RUNNER = CliRunner()
EXAMPLES = Path(__file__).resolve().parents[2] / "config" / "examples"


def all_commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Yield the words of every command, including those of groups."""
    found = get_command(app) if group is None else group
    for name, command in getattr(found, "commands").items():  # noqa: B009 - the group's type is not exported
        if hasattr(command, "commands"):
            yield from all_commands(command, (*path, name))
        else:
            yield [*path, name]


@pytest.mark.parametrize("command", list(all_commands()), ids=" ".join)
def test_every_command_has_an_example_and_json(command: list[str]) -> None:
    result = RUNNER.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"Example: kvstore {' '.join(command)}" in result.output
    assert "--json" in result.output


def test_the_command_imports_nothing_that_only_some_commands_need() -> None:
    """A probe runs it every few seconds."""
    heavy = {"httpx", "numpy", "torch", "urllib.request", "vllm", "yaml"}
    run = "from kvstore.tools.cli import main\ntry: main()\nfinally:"
    code = f"import sys; sys.argv[1:] = ['ping', '--help']; {run} print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "set()"


def test_version_as_json() -> None:
    result = RUNNER.invoke(app, ["version", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout).keys() == {"kvstore", "vllm", "torch"}


def test_a_good_configuration() -> None:
    result = RUNNER.invoke(app, ["config", "check", str(EXAMPLES / "cpu-and-disk.yaml"), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["config"]["max_local_disk_size"] == 20.0


def test_a_misspelt_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("chunk_sice: 256\n", encoding="utf-8")
    result = RUNNER.invoke(app, ["config", "check", str(file)])
    assert result.exit_code == 2
    assert "chunk_size" in result.stderr
