"""``kvstore doctor`` sees what is wrong with a machine, and says what to do."""

from __future__ import annotations

import os
import resource
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.redis_server import RedisServer, running

from kvstore.config import StoreConfig
from kvstore.hostlimits import MemoryLimit
from kvstore.tiers._folder import FolderLock, make_folder
from kvstore.tools import doctor
from kvstore.tools.doctor import Finding, diagnose


def look(config: dict[str, Any], *, workers: int = 1, needed_gb_per_s: float = 1e-9) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    needs = {"bytes_per_token": 1, "prefill_tokens_per_s": needed_gb_per_s * 1e9}
    for finding in diagnose(StoreConfig(**config), workers=workers, **needs):  # type: ignore[arg-type]
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
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: limit)
    (finding,) = look({"max_local_cpu_size": 1.0}, workers=4)["memory"]
    assert finding.state == state
    assert "memory.max" in finding.found


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    (finding,) = look({"max_local_cpu_size": 0.1})["open files"]
    assert (finding.state, finding.remedy) == ("warning", "ulimit -n 1024")


def test_versions_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.31.2")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    found = look({"max_local_cpu_size": 0.1})
    assert states(found["vLLM"]) == {"error"}
    assert states(found["layout"]) == {"warning"}

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert states(look({"max_local_cpu_size": 0.1})["vLLM"]) == {"warning"}


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small, too slow, without direct I/O, no folder at all, or in use."""
    folder = {"max_local_cpu_size": 0.1, "local_disk": str(tmp_path), "max_local_disk_size": 0.1}
    topic = f"disk {tmp_path}"
    assert [f.found.split(",")[0] for f in look({**folder, "max_local_disk_size": 1e5})[topic] if f.state == "error"]
    slow = look(folder, needed_gb_per_s=1e6)[topic]
    assert [f for f in slow if f.state == "warning" and "faster disk" in f.remedy]
    monkeypatch.setattr(doctor, "probe_direct", lambda _: False)
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
        assert states(look({**config, "remote_password": "no"})["Redis"]) == {"warning"}
        assert states(look({**config, "remote_password": "no", "remote_required": True})["Redis"]) == {"error"}
        admin = server.admin(password="pw")
        for name, value in (("maxmemory-policy", "noeviction"), ("maxmemory", 0)):
            admin.config_set(name, value)
            (finding,) = look(config)[f"Redis 127.0.0.1:{server.port}"]
            assert finding.state == "warning"
            assert name in finding.remedy
    assert states(look({"max_local_cpu_size": 0.1, "remote_url": "lm://x:1"})["remote tier"]) == {"warning"}


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
