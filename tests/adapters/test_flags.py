"""Flags of vLLM: those that the documentation shows are vLLM's, and ``kvstore warm`` hands them on."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvstore.errors import ConfigError

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "config/examples").glob("*.yaml"))]


def served(text: str) -> list[list[str]]:
    """The flags behind every ``vllm serve MODEL`` in a page, comments and continued lines joined."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    lines = re.findall(r"^[#$ ]*(?:KVSTORE|LMCACHE)_CONFIG_FILE=\S+ vllm serve (.*)$", joined, re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("page", [p for p in PAGES if served(p.read_text())], ids=lambda page: page.name)
def test_vllm_takes_the_flags_that_are_shown(page: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for flags in served(page.read_text()):
        found = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(flags)
        assert found.kv_transfer_config.kv_connector == "KVStoreConnector"
        assert found.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_most_pages_show_some() -> None:
    assert sum(bool(served(page.read_text())) for page in PAGES) >= 6


def test_flags_behind_two_dashes() -> None:
    """Only those that were given are handed on; what warming decides itself is refused."""
    from kvstore.adapters.vllm.offline.engine import parse_engine_args

    assert parse_engine_args([]) == {}
    flags = ["--dtype", "float32", "--block-size", "32", "--enforce-eager", "--tensor-parallel-size", "2"]
    expected = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "tensor_parallel_size": 2}
    assert parse_engine_args(flags) == expected
    for wrong in (["--no-such-flag"], ["--block-size", "many"], ["--model", "x"], ["stray"]):
        with pytest.raises(ConfigError):
            parse_engine_args(wrong)
