"""Examples on documentation pages: commands print the output shown, configurations load, programs run, in page order.

``make pages`` runs the same with real vLLM; this file runs all that does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.example_tier import install_example
from typer.testing import CliRunner

from kvstore.config import load_config
from kvstore.tools.cli import app
from kvstore.tools.dev.pages.blocks import COMMANDS, Block, Command, blocks, commands, pages
from kvstore.tools.dev.pages.running import PageRun, Result, _in_any_order, _in_order
from kvstore.tools.dev.pages.stand_ins import STAND_INS, needs_vllm, reason_of_command, server_of

PAGES = pages()
GROUPS = {"config", "engine", "pack"}


def run(page: Path, folder: Path) -> list[Result]:
    """Run all blocks of a page that need no vLLM."""
    with PageRun(folder, with_vllm=False) as running:
        return [result for block in blocks(page) for result in running.run(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_it_shows_works(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "page"
    folder.mkdir()
    failed = [result for result in run(page, folder) if result.verdict == "failed"]
    assert not failed, "\n".join(f"{result.place}: {result.text}\nprints\n{result.remark}" for result in failed)


def shown() -> Iterator[Block]:
    """Yield the blocks of all pages that hold commands."""
    return (block for page in PAGES for block in blocks(page) if block.kind in COMMANDS)


def test_there_are_transcripts() -> None:
    listed = list(_all_commands())
    assert sum(bool(command.output) and not needs_vllm(command.text) for command in listed) >= 15
    assert sum(needs_vllm(command.text) for command in listed) >= 15


def test_commands_that_are_not_run_are_understood() -> None:
    """The options that they show exist."""
    for command in _all_commands():
        words = command.words
        if words[0] == "kvstore":
            own = words[1 : words.index("--")] if "--" in words else words[1:]
            path = own[: 1 + (own[0] in GROUPS)]
            options = [word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)]
            help_text = CliRunner().invoke(app, [*path, "--help"]).output
            assert all(option in help_text for option in options), f"{command.page}:{command.line}: {command.text}"


def test_every_reason_is_one() -> None:
    """A block that is not run gives a reason; a server of ours is run."""
    for page in PAGES:
        for block in blocks(page):
            assert not block.reason or len(block.reason.split()) >= 3, f"{page.name}:{block.line}: {block.reason}"
    assert any(server_of(command.words) and not reason_of_command(command.text) for command in _all_commands())


def _all_commands() -> Iterator[Command]:
    return (command for block in shown() for command in commands(block))


def test_every_stand_in_stands_in() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    unused = [item.pattern for item in STAND_INS if not re.search(item.pattern, text, re.MULTILINE)]
    assert not unused


def test_the_configuration_of_the_tier_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is valid with the package that its page shows."""
    (page,) = (page for page in PAGES if page.name == "tiers.md")
    install_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, block in enumerate(block for block in blocks(page) if block.kind == "yaml"):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block.body, encoding="utf-8")
        assert load_config(path=file, environ={}).warnings == ()


class TestRunning:
    """Verdicts of the script on a page."""

    @pytest.fixture
    def page(self, tmp_path: Path) -> Path:
        (tmp_path / "page").mkdir()
        return tmp_path / "page.md"

    def verdicts(self, page: Path, text: str) -> list[str]:
        page.write_text(text, encoding="utf-8")
        return [result.verdict for result in run(page, page.with_suffix(""))]

    def test_output_that_differs(self, page: Path) -> None:
        assert self.verdicts(page, "```console\n$ echo a 1\na 1\n$ echo a 1\na 2\n$ false\n```") == [
            "ok",
            "failed",
            "failed",
        ]

    def test_lines_that_are_left_out(self, page: Path) -> None:
        text = "```console\n$ printf 'a\\nb\\nc\\n'\na\n...\nc\n$ printf 'a\\nb\\n'\n...\nc\n```"
        assert self.verdicts(page, text) == ["ok", "failed"]

    def test_commands_of_several_lines(self, page: Path) -> None:
        here = "cat > f <<'END'\nit's\nEND\ngrep -q s \\\n  f\ntest 'a\nb' != 'a b'"
        assert self.verdicts(page, f"```sh\n# a comment\n{here}\n```") == ["ok"] * 3

    def test_files_and_programs_of_a_page_go_together(self, page: Path) -> None:
        text = "```yaml\n# a.yaml\nchunk_size: 32\n```\n```sh\ngrep 32 a.yaml\n```\n```python\na = 1\n```\n"
        text += "```python\nassert a == 2\n```"
        assert self.verdicts(page, text) == ["ok", "ok", "ok", "failed"]

    def test_a_configuration_that_is_wrong(self, page: Path) -> None:
        assert (
            self.verdicts(page, "```yaml\nchunk_sise: 32\n```\n```yaml\nenable_blending: true\n```") == ["failed"] * 2
        )

    def test_what_is_not_run(self, page: Path) -> None:
        text = (
            "<!-- not run: needs a GPU -->\n```sh\nfalse\n```\n"
            "<!-- not run: of something else -->\ntext\n```sh\nfalse\n```\n"
            "```sh\npip install x\nno-such-program\n```\n```text\nfalse\n```\n```\nvllm serve MODEL\n```"
        )
        assert self.verdicts(page, text) == ["not run", "failed", "not run", "not run", "not run", "not run"]

    def test_a_server_that_ends_at_once(self, page: Path) -> None:
        assert self.verdicts(page, "```sh\nkvstore serve --config none.yaml\n```") == ["failed"]

    def test_numbers_and_reports_of_a_machine(self) -> None:
        shown = ["ok       a: 1 GiB", "warning  b: 2", "           mend it"]
        assert _in_any_order(shown, ["error    b: 7", "           mend it", "ok       a: much"])
        assert not _in_any_order(shown, ["error    b: 7", "ok       a: much"])
        assert not _in_any_order(shown, ["error    b: 7", "           mend it", "ok       a: much", "ok       c: 1"])
        assert _in_order(["...", "TTFT: 2.033 s", "..."], ["x", "TTFT: 31 s"], any_numbers=True)
        assert not _in_order(["TTFT: 2.033 s"], ["TTFT: 31 s"], any_numbers=False)
        assert not _in_order(["a", "...", "a"], ["a"], any_numbers=False)
        assert _in_order(["...", "b", "...", "b"], ["a", "b", "b", "c", "b"], any_numbers=False)
        assert not _in_order(["...", "x", "..."], ["a", "b"], any_numbers=False)
