"""``kvstore doctor -- <flags of vllm serve>``, which finds errors before the model loads."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import POOL_BYTES, serving, short_folder

from kvstore.config import load_config
from kvstore.memory.limits import MemoryLimit
from kvstore.protocol.keyfiles import make_keys, read_list, read_pair
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.tiers.disk.folder import FolderLock, make_folder
from kvstore.tools.doctor import machine
from kvstore.tools.doctor.findings import Finding
from kvstore.tools.doctor.flags import check_flags, extra_config
from kvstore.tools.doctor.together import check_together
from kvstore.tools.processes import free_port
from kvstore.tools.vllmflags import parse_serve

GOOD = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
OTHER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all configuration from the environment, and what the machine's disks and free memory would add."""
    for name in list(os.environ):
        if name.startswith(("KVSTORE_", "LMCACHE_", "VLLM_PLUGINS")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "measure_disk", lambda *_, **__: (1e10, 1e10))
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: MemoryLimit(1 << 36, "plenty"))


def several(*parts: dict[str, Any]) -> dict[str, Any]:
    return {**GOOD, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(parts)}}


def findings(transfer: object, *more: str, **settings: object) -> list[Finding]:
    """Return the findings about the flags, and about flags and settings together."""
    words = [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
    flags = parse_serve(["m", *words, *more])
    extra = {f"kvstore.{key}": value for key, value in settings.items()}
    config = load_config({**extra_config(flags.transfer), **extra}, environ={}, log_warnings=False).config
    return [*check_flags(flags), *check_together(flags, config)]


def wrong(found: list[Finding]) -> list[tuple[str, str]]:
    assert all(one.remedy for one in found if one.state != "ok")
    return [(one.state, one.topic) for one in found if one.state != "ok"]


def test_flags_that_are_well() -> None:
    found = findings(GOOD, "--shutdown-timeout", "30", local_disk="/d", max_local_disk_size=1.0)
    assert wrong(found) == []
    assert {one.topic for one in found} == {"connector", "role", "policy", "workers", "blocks", "shutdown"}
    assert wrong(findings(several(GOOD, OTHER))) == []
    assert wrong(findings({**GOOD, "kv_role": "kv_producer", "kv_load_failure_policy": "fail"}, enable_pd=True)) == [
        ("warning", "shutdown")
    ], "a producer loads nothing"


@pytest.mark.parametrize(
    ("transfer", "topic", "part"),
    [
        (None, "connector", "without kvstore"),
        ({"kv_role": "kv_both"}, "connector", "kv_connector is not given"),
        ({**GOOD, "kv_connector": "KVStoreConector"}, "connector", "vLLM knows no such connector"),
        ({**GOOD, "kv_connector": "kvstoreconnector"}, "connector", "vLLM knows no such connector"),
        ({**GOOD, "kv_connector": "LMCacheConnectorV1"}, "connector", "is not kvstore"),
        ({**GOOD, "kv_connector_module_path": "lmcache"}, "connector", "kv_connector_module_path"),
        ({**GOOD, "kv_connector_extra_config": [1]}, "connector", "is no object"),
        (several(OTHER), "connector", "none of the connectors"),
        (several(OTHER, GOOD), "connector", "not the first"),
        ({**GOOD, "kv_roles": "kv_both"}, "flags", "no field 'kv_roles'"),
        ({**GOOD, "kv_role": "both"}, "role", "kv_role is 'both'"),
        ({**GOOD, "kv_role": ["kv_both"]}, "role", "kv_role is ['kv_both']"),
        ({key: value for key, value in GOOD.items() if key != "kv_role"}, "role", "kv_role is not given"),
        ({**GOOD, "kv_load_failure_policy": "fail"}, "policy", 'policy is "fail"'),
        ({key: GOOD[key] for key in ("kv_connector", "kv_role")}, "policy", 'policy is "fail"'),
        ({**several(GOOD), "kv_load_failure_policy": "fail"}, "policy", 'policy is "fail"'),
        (several({**GOOD, "kv_load_failure_policy": "fail"}), "policy", 'policy is "fail"'),
    ],
)
def test_what_is_wrong_with_the_connector(transfer: object, topic: str, part: str) -> None:
    found = findings(transfer)
    assert wrong(found) == [("error", topic)]
    assert part in next(one.found for one in found if one.state == "error")


def test_flags_that_cannot_be_read() -> None:
    flags = parse_serve(["m", "--kv-transfer-config", "{'kv_connector': 'KVStoreConnector'}"])
    (finding,) = check_flags(flags)
    assert (finding.state, "is not JSON" in finding.found) == ("error", True)
    assert ("error", "connector") in wrong(findings(GOOD, "--kv-offloading-size", "4"))


def test_a_plugin_that_vllm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert wrong(findings(GOOD)) == [("error", "connector")]
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvstore")
    assert wrong(findings(GOOD)) == []


@pytest.mark.parametrize(
    ("flags", "settings", "expected"),
    [
        ("--block-size 48", {}, ("warning", "blocks")),
        ("", {"chunk_size": 100}, ("warning", "blocks")),
        ("--block-size 0", {}, ("error", "blocks")),
        ("--block-size 64", {"max_tokens_per_load": 32}, ("error", "blocks")),
        ("", {"remote_url": "redis://h"}, ("warning", "shutdown")),
        ("--shutdown-timeout 0", {"local_disk": "/d", "max_local_disk_size": 1}, ("warning", "shutdown")),
        ("-dcp 2", {}, ("error", "workers")),
        ("--enable-prompt-embeds", {}, ("warning", "prompt embeddings")),
        ("--load-format dummy", {}, ("error", "model")),
        ("", {"max_local_gpu_size": 1.0}, ("warning", "GPU memory")),
        (
            "--enable-sleep-mode --gpu-memory-utilization=0.8",
            {"max_local_gpu_size": 1.0},
            ("warning", "GPU memory"),
        ),
        (
            "--shutdown-timeout 9",
            {"enable_async_loading": False, "remote_url": "redis://h"},
            ("error", "scheduling"),
        ),
        ("--shutdown-timeout 9", {"enable_pd": True, "pd_role": "sender"}, ("warning", "hand-over")),
        (
            "--shutdown-timeout 9 -tp 2",
            {"enable_pd": True, "pd_peer_init_port": [free_port()]},
            ("error", "ports"),
        ),
        (
            "--shutdown-timeout 9",
            {
                "enable_pd": True,
                "pd_peer_init_port": free_port(),
                "server_key_file": "/none",
                "server_clients": "/none",
            },
            ("error", "keys"),
        ),
    ],
)
def test_flags_and_settings_that_do_not_fit(flags: str, settings: dict[str, object], expected: tuple[str, str]) -> None:
    assert wrong(findings(GOOD, *flags.split(), **settings)) == [expected]


def test_flags_and_settings_that_fit() -> None:
    fits = [
        ("--block-size 64", {"chunk_size": 128}),
        ("--load-format dummy", {"model_id": "m"}),
        ("--shutdown-timeout 9 --no-async-scheduling", {"enable_async_loading": False, "remote_url": "redis://h"}),
        ("--shutdown-timeout 9", {"enable_pd": True, "pd_peer_init_port": free_port()}),
        ("--gpu-memory-utilization 0.8", {"max_local_gpu_size": 1.0}),
    ]
    for flags, settings in fits:
        assert wrong(findings(GOOD, *flags.split(), **settings)) == []  # type: ignore[arg-type]


def test_roles_that_need_another_engine() -> None:
    assert wrong(findings({**GOOD, "kv_role": "kv_producer"})) == [("warning", "hand-over")]
    consumer = {**GOOD, "kv_role": "kv_consumer"}
    assert wrong(findings(consumer, "--shutdown-timeout", "9", enable_pd=True)) == [("error", "hand-over")]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings(GOOD, "--shutdown-timeout", "9", enable_pd=True, pd_peer_init_port=port)
    assert wrong(found) == [("error", "ports")]


def test_ports_that_there_are_not() -> None:
    found = findings(GOOD, "--shutdown-timeout", "9", "-tp", "2", enable_pd=True, pd_peer_init_port=65_535)
    assert ("error", "ports") in wrong(found)


def flag(**settings: object) -> list[str]:
    extra = {f"kvstore.{key}": value for key, value in settings.items()}
    return ["--kv-transfer-config", json.dumps({**GOOD, "kv_connector_extra_config": extra})]


def doctor_of(run: Any, *words: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Run ``kvstore doctor --json -- m words``."""
    result = run("doctor", "--json", "--", "m", *words)
    found: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(result.stdout)["findings"]:
        found.setdefault(one["topic"], []).append(one)
    return result.exit_code, found


def test_no_configuration_is_said(run: Any) -> None:
    code, found = doctor_of(run, *flag())
    assert (code, found["configuration"][0]["state"]) == (0, "warning")
    assert found["configuration"][0]["found"].startswith("none is given")
    code, found = doctor_of(run, *flag(max_local_cpu_size=0.1, chunk_size=512))
    assert [(one["state"], one["found"]) for one in found["configuration"]] == [("ok", "2 keys from the flags")]


def test_what_is_ignored_is_said(run: Any) -> None:
    _, found = doctor_of(run, *flag(max_local_cpu_size=0.1, numa_mode="auto"))
    assert [one["state"] for one in found["configuration"]] == ["ok", "warning"]


def test_a_configuration_that_cannot_be_used(run: Any) -> None:
    """The findings about the flags are reported all the same."""
    code, found = doctor_of(run, "--kv-transfer-config", json.dumps({**OTHER}))
    assert code == 1
    extra = {"kvstore.chunk_sise": 1}
    bad = {**GOOD, "kv_role": "both", "kv_connector_extra_config": extra}
    code, found = doctor_of(run, "--kv-transfer-config", json.dumps(bad))
    assert (code, found["role"][0]["state"], found["configuration"][0]["state"]) == (2, "error", "error")
    assert "chunk_size" in found["configuration"][0]["found"]


def test_what_is_worst_comes_last(run: Any) -> None:
    lines = run(
        "doctor", "--", "m", "--kv-transfer-config", json.dumps({**GOOD, "kv_role": "both"})
    ).stdout.splitlines()
    states = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert states == sorted(states, key=["ok", "warning", "error"].index)
    assert lines[-2].startswith("error    role")


def test_a_folder_in_use_is_an_error_before_a_start(tmp_path: Path, run: Any) -> None:
    """The folder of any worker counts."""
    settings = {"max_local_cpu_size": 0.1, "local_disk": str(tmp_path), "max_local_disk_size": 0.1}
    for folder, words in ((tmp_path, []), (tmp_path / "rank-1-of-2", ["-tp", "2"])):
        make_folder(folder)
        lock = FolderLock(folder)
        code, found = doctor_of(run, *flag(**settings), *words)
        (finding,) = found[f"disk {tmp_path}"]
        assert (code, finding["state"], str(os.getpid()) in finding["found"]) == (1, "error", True)
        lock.release()
        code, found = doctor_of(run, *flag(**settings), *words)
        assert {one["state"] for one in found[f"disk {tmp_path}"]} == {"ok"}, "and it is free again"


def test_sizes_count_for_each_worker(tmp_path: Path, run: Any) -> None:
    settings = {"max_local_cpu_size": 0.1, "local_disk": str(tmp_path), "max_local_disk_size": 0.25}
    _, found = doctor_of(run, *flag(**settings), "-tp", "4")
    assert found["memory"][0]["found"].startswith("409.6 MiB wanted for 4 worker(s)")
    assert found[f"disk {tmp_path}"][0]["found"].startswith("1.0 GiB wanted")


@contextmanager
def locked_server(keys: Path) -> Iterator[str]:
    """Yield the URL of a server that admits only one client."""
    for name in ("server", "clients/good"):
        make_keys((keys / name).parent, Path(name).name)
    pair, listed = read_pair(keys / "server.key"), read_list(keys / "clients")
    with short_folder() as folder:
        options = ServerOptions(POOL_BYTES, folder, TcpAddress("127.0.0.1", 0), keys=pair, listed=listed)
        with serving(options) as server:
            yield f"kvs://127.0.0.1:{server.hub.tcp_port}"


def test_a_server_that_does_not_know_this_key(tmp_path: Path, run: Any) -> None:
    make_keys(tmp_path / "keys", "stranger")
    with locked_server(tmp_path / "keys") as url:
        for own, state, part in (
            ("clients/good.key", "ok", ""),
            ("stranger.key", "error", "server_clients"),
            (None, "error", "set remote_key_file"),
        ):
            keys = {} if own is None else {"remote_key_file": f"{tmp_path}/keys/{own}"}
            if own is not None:
                keys["remote_server_key_file"] = f"{tmp_path}/keys/server.pub"
            shared = {"remote_url": url, "blocking_timeout_secs": 1.0, "max_local_cpu_size": 0.1}
            code, found = doctor_of(run, *flag(**shared, **keys))
            assert (code, found["cache server"][0]["state"]) == (int(state == "error"), state)
            assert part in found["cache server"][0]["remedy"]


@pytest.mark.parametrize(
    "arguments", [["kvstore.yaml"], ["--workers", "2", "--", "m"], ["--", "m", "--config", "/none"]]
)
def test_wrong_usage(run: Any, arguments: list[str]) -> None:
    result = run("doctor", *arguments)
    assert (result.exit_code, result.stderr.startswith("error: ")) == (2, True)
