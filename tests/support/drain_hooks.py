"""Hooks in deploy/ that drain an engine before it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typer.testing import CliRunner

from kvstore.tools.cli import app

LAST_QUESTION_S: Final = 5
"""Longest answer to the order that is given when the wait is over."""


def assert_drains(command: Sequence[str]) -> int:
    """Check that a command is one of ours and drains the workers of its container; return its wait in seconds."""
    assert command[:4] == ["kvstore", "engine", "drain", "--workers"]
    result = CliRunner().invoke(app, [*command[1:], "--help"])  # not the order itself, which workers here would hear
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, [*command[1:], "--not-one", "--help"]).exit_code == 2
    return int(command[command.index("--wait-s") + 1])
