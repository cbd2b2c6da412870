"""The unit for systemd, as systemd reads it, and what it takes from kvstore."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.drain_hooks import LAST_QUESTION_S, assert_drains

from kvstore.config import load_config

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "kvstore.service"
DROP_IN = UNIT.with_name("drain.conf")
PROGRAM = "/opt/kvstore/bin/kvstore"
MAX_EXPOSURE = 20  # of 100, as systemd counts: the host's network remains

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def values(key: str, file: Path = UNIT) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", file.read_text(), re.MULTILINE)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Return a copy whose program exists on this machine."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    return copy


@needs_systemd
def test_systemd_takes_the_unit(unit: Path) -> None:
    result = analyze("--man=no", "verify", str(unit))
    assert (result.returncode, unit.name in result.stderr) == (0, False), result.stderr
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "ProtectHomes" in analyze("--man=no", "verify", str(unit)).stderr


@needs_systemd
def test_the_server_may_do_little(unit: Path) -> None:
    security = ("security", "--offline=yes", f"--threshold={MAX_EXPOSURE}")
    result = analyze(*security, str(unit))
    assert result.returncode == 0, result.stdout
    unit.write_text(re.sub(r"^(Protect|Restrict|Capab|SystemCall).*\n", "", unit.read_text(), flags=re.MULTILINE))
    assert analyze(*security, str(unit)).returncode != 0


def test_zeromq_may_ask_for_interfaces() -> None:
    """It aborts the server otherwise, as soon as that listens on TCP."""
    (families,) = values("RestrictAddressFamilies")
    assert {"AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"} == set(families.split())


def test_its_folder_is_that_of_the_sockets() -> None:
    (folder,), (mode,) = values("RuntimeDirectory"), values("RuntimeDirectoryMode")
    assert mode == "0700"
    assert re.findall(r"kvs\+ipc://(/[\w/]+)", UNIT.read_text()) == [f"/run/{folder}"]


def test_it_waits_for_the_chunks_and_reloads() -> None:
    (stop_s,) = values("TimeoutStopSec")
    assert int(stop_s) > load_config(environ={}).config.server_drain_secs
    (reload,), (start,), (before,) = values("ExecReload"), values("ExecStart"), values("ExecStartPre")
    assert "kill -HUP $MAINPID" in reload
    assert start.startswith(f"{PROGRAM} serve --config ")
    assert before == f"{start} --check"


def test_vllm_drains_before_its_unit_ends() -> None:
    (command,), (stop_s,) = values("ExecStop", DROP_IN), values("TimeoutStopSec", DROP_IN)
    program, *words = command.split()
    assert program == f"-{PROGRAM}", "a failure is no failure of the unit"
    assert int(stop_s) > assert_drains(["kvstore", *words]) + LAST_QUESTION_S


@needs_systemd
def test_systemd_takes_the_drop_in(tmp_path: Path) -> None:
    unit, folder = tmp_path / "vllm.service", tmp_path / "vllm.service.d"
    folder.mkdir()
    unit.write_text(f"[Service]\nExecStart={sys.executable} serve\n")
    for wrong in (False, True):
        text = DROP_IN.read_text().replace(PROGRAM, sys.executable)
        (folder / DROP_IN.name).write_text(text.replace("ExecStop=", "ExecStops=") if wrong else text)
        result = analyze("--man=no", "verify", str(unit))
        assert (DROP_IN.name in result.stderr) is wrong, result.stderr
