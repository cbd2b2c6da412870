"""The Helm chart, rendered by helm itself, which tools/dev/venv.sh installs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart" / "kvstore"
EXAMPLES = ROOT / "deploy" / "chart" / "examples"
Manifest = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm; without it the test is skipped."""
    program = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if program is None:
        pytest.skip("helm is not installed: tools/dev/venv.sh brings it")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def render(*arguments: str, example: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``helm template`` with values of an example, and further options."""
    values = ("--values", str(EXAMPLES / example)) if example else ("--set", "image.repository=kvstore")
    return helm("template", "cache", str(CHART), "--namespace", "vllm", *values, *arguments)


@functools.cache
def manifests(*arguments: str, example: str | None = None) -> list[Manifest]:
    """Return the manifests of a rendering that succeeds."""
    result = render(*arguments, example=example)
    assert result.returncode == 0, result.stderr
    return [tree for tree in yaml.safe_load_all(result.stdout) if tree is not None]


def only(kind: str, *arguments: str, example: str | None = None) -> Manifest:
    """Return the one manifest of a kind."""
    (found,) = (tree for tree in manifests(*arguments, example=example) if tree["kind"] == kind)
    return found
