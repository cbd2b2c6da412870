"""``kvstore flags`` prints the one flag, with which vLLM needs neither a file nor a variable."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.lmcache_file import EVERYTHING

from kvstore.config import StoreConfig, load_config
from kvstore.config.reference import KEYS
from kvstore.model.errors import ConfigError
from kvstore.tools.flags import as_shell, make_flags, parse_settings

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "config" / "examples").glob("*.yaml"))
ANY: dict[str, object] = {
    "true or false": True,
    "whole number": 7,
    "number": 0.5,
}
TEXTS: dict[str, object] = {
    "local_disk": ["/a", "/b c"],
    "cache_policy": "LRU",
    "disk_cache_policy": "ARC",
    "local_disk_serde": "split",
    "remote_serde": "lz4",
    "remote_url": "redis://cache:6379",
    "remote_host_url": "redis://{host}:6379",
    "server_log_level": "ERROR",
    "internal_api_server_host": "127.0.0.1",
    "request_fields": ["ttl", "pin"],
    "pd_role": "both",
    "pd_allowed_hosts": ["10.0.0.5:7300"],
    "peers": ["kvs://10.0.0.5:7300"],
    "transfer_channel": "nixl",
    "reshard_from": [1, 4],
    "local_cpu_quotas": "0123456789abcdef=1, *=0.5",
    "local_disk_quotas": "*=2.5",
    "quota_by": "tag:team",
}
BESIDE: dict[str, dict[str, object]] = {
    "local_disk": {"max_local_disk_size": 1.0},
    "max_local_disk_size": {"local_disk": "/d"},
    "pd_buffer_size": {},
    "local_disk_quotas": {"local_disk": "/d", "max_local_disk_size": 5.0},
    "remote_host_url": {"remote_url": "redis://127.0.0.1:6379"},
}


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTORE_CONFIG_FILE", "LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)


def started_with(transfer: dict[str, Any]) -> StoreConfig:
    """Return the configuration that vLLM's connector then has, without a file and a variable."""
    assert (transfer["kv_connector"], transfer["kv_load_failure_policy"]) == ("KVStoreConnector", "recompute")
    as_vllm_reads = json.loads(json.dumps(transfer.get("kv_connector_extra_config", {})))
    return load_config(as_vllm_reads, environ={}, log_warnings=False).config


def values() -> Iterator[tuple[str, object]]:
    for key, reference in KEYS.items():
        if key == "discard_partial_chunks":  # LMCache's other name for save_unfull_chunk
            continue
        default = StoreConfig.model_fields[key].default
        value = TEXTS.get(key, ANY.get(reference.kind, "x"))
        if key == "pd_buffer_size":
            value = 4096
        yield key, not default if isinstance(default, bool) else value


@pytest.mark.parametrize(("key", "value"), list(values()))
def test_every_key_can_be_in_the_flag(key: str, value: object) -> None:
    made = make_flags(None, {**BESIDE.get(key, {}), key: value}, None, {})
    found = getattr(started_with(made.transfer), key)
    assert (list(found) if isinstance(found, tuple) else found) == value


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_the_flag_of_a_file_means_the_file(file: Path) -> None:
    made = make_flags(file, {}, None, {})
    expected = load_config(path=file, environ={}, log_warnings=False).config
    assert started_with(made.transfer) == expected


def test_a_file_of_lmcaches(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(EVERYTHING.replace("cache_policy: FIFO", "cache_policy: LRU").replace("naive", "none"))
    made = make_flags(file, {}, None, {})
    assert started_with(made.transfer) == load_config(path=file, environ={}, log_warnings=False).config
    assert made.transfer["kv_role"] == "kv_producer", "as pd_role says"
    assert any("numa_mode: ignored" in note for note in made.notes)


def test_options_are_enough(run: Any) -> None:
    result = run("flags", "--memory", 20, "--disk", "/mnt/kv", "--disk-size", 200, "--remote", "redis://cache:6379")
    (line,) = result.stdout.splitlines()
    flag, value = shlex.split(line)
    assert flag == "--kv-transfer-config"
    config = started_with(json.loads(value))
    assert (config.max_local_cpu_size, config.local_disk, config.max_local_disk_size) == (20.0, "/mnt/kv", 200.0)
    assert config.remote_url == "redis://cache:6379"
    assert result.stderr.splitlines()[-1].startswith("add --shutdown-timeout 30")
    assert run("flags", "--memory", 20).stderr == "", "nothing is on its way when vLLM ends"


def test_options_count_before_the_file(tmp_path: Path, run_json: Any) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("chunk_size: 512\nmax_local_cpu_size: 1.0\n")
    code, tree = run_json("flags", file, "--memory", 2)
    assert code == 0
    assert tree["kv_connector_extra_config"] == {"kvstore.chunk_size": 512, "kvstore.max_local_cpu_size": 2.0}


@pytest.mark.parametrize("name", ["it's", 'a "b" $HOME `x` \\', "ü {a,b} *"])
def test_a_shell_reads_what_was_meant(name: str) -> None:
    """The flag may be copied, or used with eval."""
    made = make_flags(None, {"model_id": name}, None, {})
    script = 'eval "set -- $(cat)"; printf %s "$2"'
    done = subprocess.run(
        ["sh", "-c", script], input=as_shell(made.transfer), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == made.transfer


@pytest.mark.parametrize(
    ("role", "given", "expected"),
    [
        ("producer", {}, {"enable_pd": True}),
        ("consumer", {}, {"enable_pd": True, "pd_peer_init_port": 7300}),
        ("both", {}, {}),
        ("consumer", {"pd_peer_init_port": 8000}, {"enable_pd": True, "pd_peer_init_port": 8000}),
        ("consumer", {"remote_url": "redis://h"}, {"enable_pd": True, "remote_url": "redis://h"}),
        ("producer", {"enable_pd": False}, {"enable_pd": False}),
        (
            "consumer",
            {"pd_role": "sender", "enable_pd": True},
            {"pd_role": "receiver", "enable_pd": True, "pd_peer_init_port": 7300},
        ),
        (None, {"pd_role": "sender", "enable_pd": True}, {"pd_role": "sender", "enable_pd": True}),
    ],
)
def test_roles(tmp_path: Path, role: str | None, given: dict[str, object], expected: dict[str, object]) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text(json.dumps(given))
    transfer = make_flags(file, {}, role, {}).transfer
    assert transfer["kv_role"] == {"both": "kv_both", "consumer": "kv_consumer"}.get(str(role), "kv_producer")
    extra = transfer.get("kv_connector_extra_config", {})
    assert {name.removeprefix("kvstore."): value for name, value in extra.items()} == expected


@pytest.mark.parametrize("url", ["redis://me:secret@h", "redis://:secret@h", "redis://h?password=secret"])
def test_a_password_is_in_the_flag_and_in_a_warning(url: str, run: Any) -> None:
    result = run("flags", "--remote", url, "--json")
    assert json.loads(result.stdout)["kv_connector_extra_config"]["kvstore.remote_url"] == url
    assert result.stderr.startswith("warning: remote_url: a password in a flag can be read by all users")
    assert "secret" not in result.stderr
    assert "warning" not in run("flags", "--remote", "redis://me@h?timeout_s=3").stderr
    assert run("flags", "--set", "remote_password=secret").stderr.startswith("warning: remote_password: ")


def test_a_file_that_the_environment_names_counts_beside_the_flag(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CONFIG_FILE", "/nowhere.yaml")
    result = run("flags", "--memory", 1)
    assert (result.exit_code, result.stderr.split(":")[0]) == (0, "warning")
    assert "KVSTORE_CONFIG_FILE is set" in result.stderr


def test_settings() -> None:
    given = [
        "chunk_size=512",
        "model_id=0123",
        "peers=kvs://a:1, kvs://b:2",
        'local_disk=["/a", /b]',
        "local_cpu=false",
    ]
    assert parse_settings(given) == {
        "chunk_size": 512,
        "model_id": "0123",
        "peers": "kvs://a:1, kvs://b:2",
        "local_disk": ["/a", "/b"],
        "local_cpu": False,
    }
    for wrong in ("chunk_size", "chunk_size=[1"):
        with pytest.raises(ConfigError, match="--set"):
            parse_settings([wrong])


@pytest.mark.parametrize(
    "arguments",
    [
        "--disk /mnt/kv",
        "--set chunk_sise=1",
        "--set chunk_size",
        "--role sender",
        "--memory 0",
        "/nowhere.yaml",
        "--disk '' --disk-size 1",
        "--remote ''",
    ],
)
def test_what_config_check_refuses(run: Any, arguments: str) -> None:
    result = run("flags", *shlex.split(arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
