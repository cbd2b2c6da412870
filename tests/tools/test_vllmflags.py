"""Flags of ``vllm serve``, as vLLM reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.tools.vllmflags import parse_serve
from kvstore.tools.workers import Workers

TRANSFER = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--block-size", "32", "--kv-transfer-config", json.dumps(TRANSFER)],
        ["vllm", "serve", "m", "--block-size=32", f"--kv-transfer-config={json.dumps(TRANSFER)}"],
        ["--model=m", "--block_size", "16", "--block-size", "32", "--kv_transfer_config", json.dumps(TRANSFER)],
        [
            *["m", "--unknown", "--port", "8000", "--trust-remote-code", "--lora-modules", "a=b", "c=d", "-O3"],
            *["--block-size", "32", "--kv-transfer-config.kv_connector", "KVStoreConnector"],
            "--kv-transfer-config.kv_role=kv_both",
        ],
    ],
)
def test_spellings(arguments: list[str]) -> None:
    flags = parse_serve(arguments)
    assert (flags.model, flags.given["--block-size"], flags.transfer) == ("m", 32, TRANSFER)
    assert flags.problems == ()


def test_parts_with_dots() -> None:
    flags = parse_serve(
        [
            *["m", "--kv-transfer-config.kv_connector_extra_config.kvstore.chunk_size", "512"],
            *["--kv-transfer-config.kv_connector_extra_config.list+", "a,b"],
            "--kv-transfer-config.kv_role=kv_both",
        ]
    )
    extra = {"kvstore": {"chunk_size": 512}, "list": ["a", "b"]}
    assert flags.transfer == {"kv_connector_extra_config": extra, "kv_role": "kv_both"}


def test_parts_replace_what_is_json() -> None:
    """vLLM does the same, and the other parts are lost."""
    flags = parse_serve(["m", "--kv-transfer-config", json.dumps(TRANSFER), "--kv-transfer-config.kv_role=kv_both"])
    assert flags.transfer == {"kv_role": "kv_both"}
    assert "parts only" in flags.problems[0]


def test_switches() -> None:
    flags = parse_serve(["m", "--enable-prompt-embeds", "--no-async-scheduling"])
    assert (flags.given["--enable-prompt-embeds"], flags.given["--async-scheduling"]) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ("", Workers(1, 1)),
        ("-tp 4", Workers(4, 1)),
        ("-tp=2 --pipeline-parallel-size 3", Workers(6, 1)),
        ("-tp 2 -dp 8 -dpl 2", Workers(2, 2)),
        ("-dp 64 --data-parallel-rank 3", Workers(1, 1)),
    ],
)
def test_workers(arguments: str, workers: Workers) -> None:
    assert parse_serve(["m", *arguments.split()]).workers == workers


def test_folders_of_workers() -> None:
    base = Path("/d")
    assert Workers().folders(base) == [base]
    assert Workers(2).folders(base) == [base / "rank-0-of-2", base / "rank-1-of-2"]
    assert Workers(1, 2).folders(base) == [base / "replica-0", base / "replica-1"]
    assert Workers(2, 2).folders(base)[-1] == base / "replica-1" / "rank-1-of-2"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[]"],
        ["--kv-transfer-config", "[" * 100_000],
        ["--kv-transfer-config"],
        ["--block-size", "many"],
        ["-tp", "100000"],
        ["--config=/nowhere.yaml"],
        ["--kv-transfer-config.a=1", "--kv-transfer-config.a.b=1"],
        ["--kv-transfer-config.a"],
    ],
)
def test_what_cannot_be_read(arguments: list[str]) -> None:
    (problem,) = parse_serve(["m", *arguments]).problems
    assert problem.startswith("--")


def test_a_file_of_flags(tmp_path: Path) -> None:
    """Flags on the command line take precedence over it."""
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nblock-size: 32\ntensor_parallel_size: 2\nenable-prompt-embeds: true\nasync-scheduling: false\n"
        "kv-transfer-config:\n  kv_connector: KVStoreConnector\n  kv_role: kv_both\n"
    )
    flags = parse_serve(["--config", str(file), "--block-size", "64"])
    assert (flags.model, flags.given["--block-size"], flags.workers, flags.transfer) == ("m", 64, Workers(2), TRANSFER)
    assert (flags.given["--enable-prompt-embeds"], flags.given["--async-scheduling"]) == (True, False)


@pytest.mark.parametrize("text", ["- a", "a: [", None])
def test_a_file_of_flags_that_is_none(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "vllm.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="--config"):
        parse_serve(["m", "--config", str(file)])
