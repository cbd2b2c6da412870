"""``kvstore doctor`` finds the faults of a machine, and names the remedies."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import POOL_BYTES, serving, serving_ipc, serving_tcp, short_folder
from support.diskwork import EVEN, MINE
from support.example_tier import MODULE, install_example
from support.redis_server import RedisServer, running

from kvstore.config import StoreConfig
from kvstore.format.pack import PackWriter, Shard
from kvstore.memory.limits import MemoryLimit
from kvstore.server.options import ServerOptions, TcpAddress
from kvstore.tiers.disk.folder import FolderLock, make_folder
from kvstore.tools.doctor import machine
from kvstore.tools.doctor.findings import Finding
from kvstore.tools.doctor.machine import diagnose
from kvstore.tools.processes import free_port
from kvstore.tools.workers import Workers


def look(
    config: dict[str, Any], *, workers: int = 1, needed_gb_per_s: float = 1e-9, starts: bool = False
) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    speed = needed_gb_per_s * 1e9
    for finding in diagnose(
        StoreConfig(**config),
        workers=Workers(workers),
        bytes_per_token=1,
        prefill_tokens_per_s=speed,
        starts=starts,
    ):
        found.setdefault(finding.topic, []).append(finding)
    return found


def states(findings: list[Finding]) -> set[str]:
    return {finding.state for finding in findings}


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    found = look({"max_local_cpu_size": 0.1, "local_disk": str(tmp_path), "max_local_disk_size": 0.1})
    assert states(found["memory"]) == states(found[f"disk {tmp_path}"]) == {"ok"}
    assert not list((tmp_path / ".free").iterdir()), "nothing is left behind"
    assert all(f.remedy for findings in found.values() for f in findings if f.state != "ok")


@pytest.mark.parametrize(("left", "state"), [(2 << 30, "error"), (4 << 30, "warning"), (40 << 30, "ok")])
def test_memory_of_all_workers(monkeypatch: pytest.MonkeyPatch, left: int, state: str) -> None:
    limit = MemoryLimit(left, "/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: limit)
    (finding,) = look({"max_local_cpu_size": 1.0}, workers=4)["memory"]
    assert finding.state == state
    assert "memory.max" in finding.found


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    (finding,) = look({"max_local_cpu_size": 0.1})["open files"]
    assert (finding.state, finding.remedy) == ("warning", "ulimit -n 1024")


def test_versions_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.99.2")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    found = look({"max_local_cpu_size": 0.1})
    assert states(found["vLLM"]) == {"warning"}
    assert states(look({"max_local_cpu_size": 0.1, "allow_untested_vllm": False})["vLLM"]) == {"error"}
    assert states(found["layout"]) == {"warning"}

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert states(look({"max_local_cpu_size": 0.1})["vLLM"]) == {"warning"}


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks may be too small, too slow, without direct I/O, not there at all, or in use."""
    folder = {"max_local_cpu_size": 0.1, "local_disk": str(tmp_path), "max_local_disk_size": 0.1}
    topic = f"disk {tmp_path}"
    assert [f.found.split(",")[0] for f in look({**folder, "max_local_disk_size": 1e5})[topic] if f.state == "error"]
    slow = look(folder, needed_gb_per_s=1e6)[topic]
    assert [f for f in slow if f.state == "warning" and "faster disk" in f.remedy]
    monkeypatch.setattr(machine, "probe_direct", lambda _: False)
    assert "warning" in states(look(folder)[topic])
    assert "error" in states(look({**folder, "use_odirect": True})[topic])
    file = tmp_path / "file"
    file.touch()
    assert states(look({**folder, "local_disk": str(file)})[f"disk {file}"]) == {"error"}
    make_folder(tmp_path)
    lock = FolderLock(tmp_path)
    (finding,) = look(folder)[topic]
    assert (finding.state, str(os.getpid()) in finding.found) == ("warning", True)
    lock.release()


def test_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, options=["maxmemory 100mb", "maxmemory-policy allkeys-lru"])
    url = f"redis://127.0.0.1:{server.port}"
    config = {"max_local_cpu_size": 0.1, "remote_url": url, "remote_password": "pw"}
    with running(server):
        server.admin().config_set("requirepass", "pw")
        good = look(config)
        assert states(good["Redis"]) == states(good[f"Redis 127.0.0.1:{server.port}"]) == {"ok"}
        for required in (False, True):  # starting it again would not help
            (wrong,) = look({**config, "remote_password": "no", "remote_required": required})["Redis"]
            assert (wrong.state, "start it" in wrong.remedy, "remote_password" in wrong.remedy) == (
                "error",
                False,
                True,
            )
        admin = server.admin(password="pw")
        for name, value in (("maxmemory-policy", "noeviction"), ("maxmemory", 0)):
            admin.config_set(name, value)
            (finding,) = look(config)[f"Redis 127.0.0.1:{server.port}"]
            assert finding.state == "warning"
            assert name in finding.remedy
    (down,) = look(config)["Redis"]
    assert (down.state, down.remedy.split(",")[0]) == ("warning", "start it")
    assert states(look({**config, "remote_required": True})["Redis"]) == {"error"}
    assert states(look({"max_local_cpu_size": 0.1, "remote_url": "lm://x:1"})["remote tier"]) == {"warning"}


@pytest.mark.parametrize("required", [False, True])
def test_cache_servers(tmp_path: Path, required: bool) -> None:
    """Servers may be up, about to end, or missing, or their keys may be unreadable."""
    config = {"max_local_cpu_size": 0.1, "remote_required": required, "blocking_timeout_secs": 0.5}
    down = "error" if required else "warning"
    with serving_ipc() as server:
        (found,) = look({**config, "remote_url": server.url})["cache server"]
        assert (found.state, found.found.split(" in ")[0]) == ("ok", "answers")
        server.hub.core.is_closing = True
        assert states(look({**config, "remote_url": server.url})["cache server"]) == {down}
    for url in (f"kvs+ipc://{tmp_path}/nowhere", f"kvs://127.0.0.1:{free_port()}"):
        (found,) = look({**config, "remote_url": url})["cache server"]
        assert (found.state, found.remedy.split(",")[0]) == (down, "start it")
    keys = {"remote_key_file": f"{tmp_path}/none", "remote_server_key_file": f"{tmp_path}/none"}
    assert states(look({**config, **keys, "remote_url": "kvs://127.0.0.1:1"})["cache server"]) == {"error"}


@pytest.mark.parametrize("required", [False, True])
def test_several_cache_servers(tmp_path: Path, required: bool) -> None:
    config = {"max_local_cpu_size": 0.1, "remote_required": required, "blocking_timeout_secs": 0.5}
    down = "error" if required else "warning"
    with serving_tcp() as server:
        there, gone = f"127.0.0.1:{server.hub.tcp_port}", f"127.0.0.1:{free_port()}"
        found = look({**config, "remote_url": f"kvs://{there},{gone}"})
        assert [states(found[f"cache server {address}"]) for address in (there, gone)] == [{"ok"}, {"warning"}]
    members = tmp_path / "members"
    assert states(look({**config, "remote_url": f"kvs+file://{members}"})["cache servers"]) == {down}
    members.write_text("# none yet\n")
    assert states(look({**config, "remote_url": f"kvs+file://{members}"})["cache servers"]) == {down}
    members.write_text("nonsense\n")
    assert states(look({**config, "remote_url": f"kvs+file://{members}"})["cache servers"]) == {"error"}


def test_peers() -> None:
    with short_folder() as folder, serving(ServerOptions(POOL_BYTES, folder, TcpAddress("127.0.0.1", 0))) as server:
        there, gone = f"kvs://127.0.0.1:{server.hub.tcp_port}", f"kvs://127.0.0.1:{free_port()}"
        config = {"max_local_cpu_size": 0.1, "peers": (there, gone), "blocking_timeout_secs": 0.5}
        found = look(config)
        assert [states(found[f"peer {url}"]) for url in (there, gone)] == [{"ok"}, {"warning"}]


def test_peers_that_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    url = f"kvs+file://{file}?timeout_s=1"
    shown = f"peers kvs+file://{file}?timeout_s=***"
    with serving_tcp() as server:
        there, gone = f"127.0.0.1:{server.hub.tcp_port}", f"127.0.0.1:{free_port()}"
        config = {"max_local_cpu_size": 0.1, "peers": (url,), "blocking_timeout_secs": 0.5}
        assert states(look(config)[shown]) == {"warning"}, "there is no file"
        file.write_text("# nobody\n")
        assert "no engine now" in look(config)[shown][0].found
        file.write_text(f"{there}\n{gone}\n")
        found = look(config)
        assert [states(found[topic]) for topic in (shown, f"peer {there}", f"peer {gone}")] == [
            {"ok"},
            {"ok"},
            {"warning"},
        ]
        file.write_text("nonsense\n")
        assert states(look(config)[shown]) == {"error"}


def test_the_address_of_this_hosts_server_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    with serving_tcp() as server:
        config = {"max_local_cpu_size": 0.1, "remote_url": f"kvs://127.0.0.1:{server.hub.tcp_port}"}
        config["blocking_timeout_secs"] = 0.5
        (found,) = look({**config, "remote_host_url": f"kvs://{{host}}:{server.hub.tcp_port}"})["remote_host_url"]
        assert (found.state, found.found.split(":")[0]) == ("ok", "at 127.0.0.1, this host's address")
        gone = {**config, "remote_host_url": f"kvs://{{host}}:{free_port()}"}
        (found,) = look(gone)["remote_host_url"]
        assert (found.state, "server_listen" in found.remedy) == ("warning", True)
        assert states(look({**gone, "remote_required": True})["remote_host_url"]) == {"error"}
        (found,) = look({**config, "remote_host_url": "kvs://10.0.0.5:5566"})["remote_host_url"]
        assert (found.state, "{host}" in found.remedy) == ("warning", True)
    redis = {"max_local_cpu_size": 0.1, "remote_url": "redis://127.0.0.1:1", "blocking_timeout_secs": 0.5}
    (found,) = look({**redis, "remote_host_url": "redis://u:secret@{host}:6379"})["remote_host_url"]
    assert (found.state, "secret" in found.found) == ("ok", False)


def test_codecs_and_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an error here, as it would be at start, and names the package to install."""
    configs: dict[str, tuple[str, dict[str, object]]] = {
        "lz4.block": ("codec lz4", {"local_disk_serde": "lz4"}),
        "zstandard": ("codec split", {"remote_serde": "split"}),
        "starlette": ("internal_api_server_enabled", {"internal_api_server_enabled": True}),
        "uvicorn": ("server_http_port", {"server_http_port": 0}),
        "zmq": ("server_listen", {"server_listen": "kvs://127.0.0.1:0"}),
        "msgspec": ("enable_pd", {"enable_pd": True}),
    }
    for module, (topic, given) in configs.items():
        config = {"max_local_cpu_size": 0.1, **given}
        assert states(look(config).get(topic, [])) <= {"ok"}
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            (finding,) = look(config)[topic]
        assert (finding.state, "pip install 'vllm-kvstore[" in finding.remedy) == ("error", True), module


@pytest.mark.parametrize(
    ("url", "missing"),
    [("redis://h", "redis"), ("s3://b", "obstore"), ("kvs://127.0.0.1:1", "zmq"), ("kvs+ipc:///nowhere", "msgspec")],
)
def test_a_tier_whose_package_is_missing(url: str, missing: str) -> None:
    """The check runs in a separate process, which has not imported the package yet."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from kvstore.config import StoreConfig\n"
        "from kvstore.tools.doctor.remote import elsewhere\n"
        f"for found in elsewhere(StoreConfig(remote_url={url!r})): print(found.state, found.found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("error "), done.stderr
    assert "pip install 'vllm-kvstore[" in done.stdout


def test_packs(tmp_path: Path) -> None:
    path = tmp_path / "a.kvpack"
    config = {"max_local_cpu_size": 0.1, "remote_url": f"pack://{path}"}
    assert states(look(config)["pack"]) == {"error"}
    with PackWriter(path, [Shard(MINE, EVEN)]) as pack:
        pack.finish()
    (finding,) = look(config)["pack"]
    assert (finding.state, finding.found.split(";")[0]) == ("ok", "0 chunks")


def test_a_tier_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"max_local_cpu_size": 0.1, "remote_url": "sqlite:///nowhere"}
    assert states(look(config)["remote tier"]) == {"ok"}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, MODULE, None)
        assert states(look(config)["remote tier"]) == {"error"}
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def test_a_wrong_password_is_exit_code_1(tmp_path: Path, run: Any) -> None:
    server = RedisServer(tmp_path)
    file = tmp_path / "kvstore.yaml"
    file.write_text(f"max_local_cpu_size: 0.1\nremote_url: redis://:wrong@127.0.0.1:{server.port}\n")
    with running(server):
        server.admin().config_set("requirepass", "pw")
        assert run("doctor", "--config", file).exit_code == 1


def test_command(tmp_path: Path, run: Any, run_json: Any) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text(f"max_local_cpu_size: 0.1\nlocal_disk: {tmp_path}/c\nmax_local_disk_size: 0.1\n", encoding="utf-8")
    code, tree = run_json("doctor", "--config", file)
    assert code == 0
    assert {finding["state"] for finding in tree["findings"]} <= {"ok", "warning"}
    file.write_text("max_local_cpu_size: 100000\n", encoding="utf-8")
    result = run("doctor", "--config", file)
    assert result.exit_code == 1
    assert "lower max_local_cpu_size" in result.stdout
    assert run("doctor", "--config", tmp_path / "none.yaml").exit_code == 2
