"""What the documentation shows of a terminal is what happens, and its examples run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.example_tier import install_example
from support.sandbox import make_sandbox
from typer.testing import CliRunner

from kvstore.config import load_config
from kvstore.tools.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARYING = ("doctor", "version")  # their numbers are this machine's
NEEDS_VLLM = ("warm", "prefetch", "demo", "bench")  # tests/e2e/test_warm.py and test_prefetch.py run them
REMEDY = " " * 11
ELSEWHERE = {"simulate", "serve"}  # tests of their own


class Shown(NamedTuple):
    """A command in the documentation, and the output under it."""

    page: str
    command: str
    output: list[str]


def shown(page: Path) -> Iterator[list[Shown]]:
    """The commands of each console block."""
    for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind != "console":
            continue
        found: list[Shown] = []
        for line in body.splitlines():
            if line.startswith("$ "):
                found.append(Shown(page.name, line[2:], []))
            elif found:
                found[-1].output.append(line)
        ours = [item for item in found if item.command.startswith("kvstore ")]
        if ours:
            yield ours


BLOCKS = [(f"{page.name} {number}", block) for page in PAGES for number, block in enumerate(shown(page))]


def runnable(block: list[Shown]) -> list[Shown]:
    return [item for item in block if shlex.split(item.command)[1] not in {*NEEDS_VLLM, *ELSEWHERE}]


@pytest.fixture(scope="module")
def sandboxed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("sandbox")
    make_sandbox(folder)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_there_are_transcripts() -> None:
    assert sum(len(runnable(block)) for _, block in BLOCKS) >= 15


@pytest.mark.parametrize("block", [b for _, b in BLOCKS if runnable(b)], ids=[n for n, b in BLOCKS if runnable(b)])
def test_the_output_is_real(sandboxed: Path, block: list[Shown]) -> None:
    """Word by word; ``...`` stands for any lines, and numbers of this machine for any others."""
    for item in runnable(block):
        _, *arguments = shlex.split(item.command)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in {0, 1}, f"{item.page}: {item.command}: {result.output}"
        got = result.output.replace(f"{sandboxed}/", "").splitlines()
        if not item.output:
            assert result.exit_code == 0, f"{item.page}: {item.command}: {result.output}"
            continue
        said = f"{item.page}: {item.command} prints\n" + "\n".join(got)
        if arguments[0] in VARYING:
            check_in_any_order(item.output, got, said)
        else:
            assert re.fullmatch("\n".join(map(_pattern, item.output)), "\n".join(got)), said


def check_in_any_order(shown_lines: list[str], got: list[str], said: str) -> None:
    """What is worst comes last, and what is bad is this machine's."""
    for line in shown_lines:
        assert line == "..." or re.search(f"^{_varying(line)}$", "\n".join(got), re.MULTILINE), said
    if "..." not in shown_lines:
        assert len(without_remedies(shown_lines)) == len(without_remedies(got)), said


def without_remedies(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith(REMEDY)]


def _pattern(line: str) -> str:
    return r"(?:.*\n?)*" if line == "..." else re.escape(line)


def _varying(line: str) -> str:
    if line.startswith(REMEDY):
        return re.escape(line)
    state, _, rest = line.partition(" ")
    topic = rest.partition(":")[0].strip()
    return rf"(?:ok|warning|error) +{re.escape(topic)}: .*" if ":" in rest else f"{re.escape(state)} .*"


def test_commands_in_shell_blocks_are_understood() -> None:
    """Options that are shown exist; what needs a server or a GPU is not run here."""
    for page in PAGES:
        for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")):
            if kind not in {"sh", "bash", "text", ""}:
                continue
            for line in body.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True) if re.match(r"(\$ )?kvstore ", line) else []
                if words:
                    own = words[1 : words.index("--")] if "--" in words else words[1:]
                    options = [word.partition("=")[0] for word in own if word.startswith("--")]
                    path = own[: 1 + (own[0] in {"config", "engine", "pack"})]
                    help_text = CliRunner().invoke(app, [*path, "--help"]).output
                    assert all(option in help_text for option in options), f"{page.name}: {line}"


WITH_GOOD_YAML = [page for page in PAGES if page.name != "configuration.md"]  # that shows a bad one, and has its test


@pytest.mark.parametrize("page", WITH_GOOD_YAML, ids=lambda page: page.name)
def test_yaml_blocks_are_configurations(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "tiers.md":  # whose configuration is that of the package it shows
        install_example(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
    for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "yaml":
            file = tmp_path / "kvstore.yaml"
            file.write_text(body, encoding="utf-8")
            assert load_config(path=file, environ={}).warnings == (), f"{page.name}: {body}"
