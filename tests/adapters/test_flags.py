"""Flags of vLLM: the documentation shows only existing ones, and ``kvstore warm`` passes them on."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from support.vllm_objects import make_arg_parser

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.tools.doctor.flags import FIELDS
from kvstore.tools.flags import as_shell, make_flags
from kvstore.tools.vllmflags import parse_serve

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "config/examples").glob("*.yaml"))]


def served(text: str) -> list[list[str]]:
    """Return the flags behind every ``vllm serve MODEL`` in a page, comments removed and continued lines joined."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    lines = re.findall(r"^[#$ ]*(?:KVSTORE|LMCACHE)_CONFIG_FILE=\S+ vllm serve (.*)$", joined, re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.parametrize("page", [p for p in PAGES if served(p.read_text())], ids=lambda page: page.name)
def test_vllm_takes_the_flags_that_are_shown(page: Path) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for flags in served(page.read_text()):
        found = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(flags)
        assert found.kv_transfer_config.kv_connector == "KVStoreConnector"
        assert found.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_most_pages_show_some() -> None:
    assert sum(bool(served(page.read_text())) for page in PAGES) >= 6


def test_flags_behind_two_dashes() -> None:
    """Only given flags are passed on; flags that warming decides itself are refused."""
    from kvstore.adapters.vllm.offline.engine import parse_engine_args

    assert parse_engine_args([]) == {}
    flags = ["--dtype", "float32", "--block-size", "32", "--enforce-eager", "--tensor-parallel-size", "2"]
    expected = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "tensor_parallel_size": 2}
    assert parse_engine_args(flags) == expected
    for wrong in (["--no-such-flag"], ["--block-size", "many"], ["--model", "x"], ["stray"]):
        with pytest.raises(ConfigError):
            parse_engine_args(wrong)


ARGUMENTS = [
    """m --block-size 32 -tp 2 --kv-transfer-config '{"kv_connector":"K","kv_role":"kv_both"}'""",
    (
        "m --block_size=64 --tensor_parallel_size=2 -pp 3 --kv_transfer_config.kv_connector=K "
        "--kv-transfer-config.kv_role kv_both"
    ),
    (
        """m --kv-transfer-config '{"kv_connector":"K","kv_role":"kv_both"}' --shutdown-timeout 30 """
        "--kv-transfer-config.kv_role=kv_producer --kv-transfer-config.kv_connector=L"
    ),
    (
        "m --enable-prompt-embeds --no-async-scheduling --kv-transfer-config.kv_role=kv_both --load-format=dummy "
        "--kv-transfer-config.kv_connector=K --kv-transfer-config.kv_connector_extra_config.kvstore.chunk_size=512 "
        "--kv-transfer-config.kv_connector_extra_config.folders+ /a,/b"
    ),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_doctor_reads_flags_as_vllm_does(arguments: str) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    theirs = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(shlex.split(arguments))
    ours = parse_serve(shlex.split(arguments))
    assert ours.transfer is not None
    for name, value in ours.transfer.items():
        assert getattr(theirs.kv_transfer_config, name) == value
    assert ours.model == theirs.model_tag
    for name, value in ours.given.items():
        if name != "--model":
            assert getattr(theirs, name.removeprefix("--").replace("-", "_")) == value, name


def test_doctor_knows_the_fields_of_the_flag() -> None:
    from vllm.config import KVTransferConfig

    assert {field.name for field in dataclasses.fields(KVTransferConfig)} <= set(FIELDS)


def test_what_kvstore_flags_prints_is_a_flag_of_vllms() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = make_flags(
        None, {"max_local_cpu_size": 2.0, "local_disk": ["/a", "/b"], "max_local_disk_size": 9.0}, None, {}
    )
    found = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(
        shlex.split(as_shell(made.transfer))
    )
    config = load_config(found.kv_transfer_config.kv_connector_extra_config, environ={}).config
    assert (config.max_local_cpu_size, config.local_disk_folders) == (2.0, ("/a", "/b"))
    assert found.kv_transfer_config.kv_load_failure_policy == "recompute"
