"""Exit codes of commands, as in docs/commands.md: 2 if nothing was done, 1 if something was found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cache_server import short_folder
from support.diskwork import make_ref, path_of

from kvstore.format.pack import PackWriter
from kvstore.model.chunks import Outcome
from kvstore.model.errors import ConfigError, FolderOwnedError, TierError
from kvstore.model.keys import Namespace
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk.folder import FolderLock, make_folder
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tools.pack import Source, Target, export, import_pack
from kvstore.tools.processes import free_port
from kvstore.tools.warm import warming
from kvstore.tools.warm.warming import WarmReport

Fill = Callable[..., Path]
REFS = [make_ref(number) for number in range(5)]


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder that an engine is using."""
    make_folder(tmp_path / "owned")
    lock = FolderLock(tmp_path / "owned")
    yield tmp_path / "owned"
    lock.release()


@pytest.fixture
def pack(fill: Fill, tmp_path: Path) -> Path:
    export(Source(fill(REFS, name="source")), tmp_path / "a.kvpack")
    return tmp_path / "a.kvpack"


def test_a_folder_in_use(owned: Path, pack: Path, fill: Fill, run: Any) -> None:
    assert run("pack", "import", pack, "--folder", owned).exit_code == 2
    busy = fill(REFS[:1], name="busy")
    lock = FolderLock(busy)
    assert run("verify", busy, "--fix").exit_code == 2
    lock.release()
    assert run("verify", busy, "--fix").exit_code == 0


def test_a_server_that_uses_the_folder_of_another(owned: Path, run: Any, tmp_path: Path) -> None:
    with short_folder() as sockets:
        file = tmp_path / "cache.yaml"
        file.write_text(
            f"max_local_cpu_size: 0.1\nserver_listen: kvs+ipc://{sockets}\n"
            f"local_disk: {owned}\nmax_local_disk_size: 0.1\n"
        )
        result = run("serve", "--config", file)
    assert (result.exit_code, "in use" in result.stderr) == (2, True)


def test_a_redis_that_is_not_there(pack: Path, run: Any) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    assert run("verify", url).exit_code == 2
    assert run("pack", "import", pack, "--redis", url).exit_code == 2


def test_a_target_that_breaks_in_the_middle(
    pack: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks imported before are there and reported."""
    put, left = DiskTier.put, [None, None]

    def break_down(tier: DiskTier, transfers: Sequence[Transfer]) -> list[Outcome]:
        if not left:
            raise TierError("the disk is gone")
        left.pop()
        return put(tier, transfers)

    monkeypatch.setattr(DiskTier, "put", break_down)
    result = run("pack", "import", pack, "--folder", tmp_path / "target")
    assert result.exit_code == 1
    assert "2 chunks imported" in result.stdout
    assert "ended in the middle: the disk is gone" in result.stderr
    with pytest.raises(TierError, match="the disk is gone"):
        import_pack(pack, Target((tmp_path / "another",)))


def test_a_pack_with_a_damaged_chunk(pack: Path, fill: Fill, run: Any, tmp_path: Path) -> None:
    raw = bytearray(pack.read_bytes())
    raw[len(raw) // 2] ^= 1
    pack.write_bytes(raw)
    assert run("pack", "import", pack, "--folder", tmp_path / "target").exit_code == 1
    folder = fill(REFS, name="damaged")
    path_of(folder, REFS[0]).write_bytes(b"")
    assert run("pack", "export", "--folder", folder, "-o", tmp_path / "b.kvpack").exit_code == 1
    assert run("pack", "export", "--folder", folder, "-o", tmp_path / "none" / "b.kvpack").exit_code == 2


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FolderOwnedError("the folder is in use"), 2),
        (TierError("the Redis does not answer"), 2),
        (ConfigError("nothing to warm"), 2),
        (OSError("no such model"), 2),
        (ValueError("no such dtype"), 2),
        (RuntimeError("the engine core did not start"), 2),
    ],
)
def test_warm_that_cannot_start(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    """A refusal by the tiers or by vLLM is reported in one line, and nothing was done."""

    from kvstore.adapters.vllm.offline import engine as offline

    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(offline, "LLM", refuse)
    file, config = tmp_path / "p.jsonl", tmp_path / "kvstore.yaml"
    file.write_text("[1, 2, 3]\n")
    config.write_text(f"max_local_cpu_size: 0.1\nlocal_disk: {tmp_path}/kv\nmax_local_disk_size: 0.1\n")
    result = run("warm", "--model", tmp_path / "model", "--prompts", file, "--config", config)
    assert (result.exit_code, str(error) in result.stderr) == (code, True)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("report", "code"),
    [(WarmReport(), 0), (WarmReport(chunks_failed=1), 1), (WarmReport(interrupted=True, chunks_failed=1), 130)],
)
def test_warm_that_ran(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: WarmReport, code: int
) -> None:
    monkeypatch.setattr(warming, "warm", lambda *_, **__: report)
    (tmp_path / "p.jsonl").write_text("[1, 2, 3]\n")
    assert run("warm", "--model", tmp_path, "--prompts", tmp_path / "p.jsonl").exit_code == code


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("zmq", "serve --config {file}", "server"),
        ("msgspec", "serve --config {file}", "server"),
        ("zmq", "serve --check --config {file}", "server"),
        ("zmq", "keygen --folder {folder} server", "server"),
        ("zmq", "ping --url kvs://127.0.0.1:1", "server"),
        ("redis", "verify redis://127.0.0.1:1", "redis"),
        ("httpx", "prefetch --model m --prompts {folder}", "warm"),
    ],
)
def test_a_package_that_is_missing(tmp_path: Path, missing: str, arguments: str, extra: str) -> None:
    """The error is one line that says what to install, without a traceback."""
    file = tmp_path / "cache.yaml"
    file.write_text(f"max_local_cpu_size: 0.1\nserver_listen: kvs+ipc://{tmp_path}/s\n")
    (tmp_path / "p.txt").write_text("a prompt")
    command = arguments.format(file=file, folder=tmp_path).split()
    code = f"import sys; sys.modules[{missing!r}] = None; from kvstore.tools.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'vllm-kvstore[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_locks_come_before_work(
    owned: Path, pack: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one line that names the process, before a model is loaded or a prompt is read."""

    def must_not(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(warming, "warm", must_not)
    monkeypatch.setattr("kvstore.tools.warm.prompts.read_prompts", must_not)
    monkeypatch.setattr("kvstore.adapters.vllm.identity.fingerprint_folder", must_not)
    file = tmp_path / "kvstore.yaml"
    worker = tmp_path / "several" / "rank-1-of-2"
    make_folder(worker)
    lock = FolderLock(worker)
    for base, flags in ((owned, []), (tmp_path / "several", ["--", "-tp", "2"])):
        file.write_text(f"max_local_cpu_size: 0.1\nlocal_disk: {base}\nmax_local_disk_size: 0.1\n")
        result = run("warm", "--model", "m", "--prompts", "none.jsonl", "--config", file, *flags)
        assert_in_use(result)
    lock.release()
    assert_in_use(run("pack", "import", pack, "--folder", owned, "--model", tmp_path))


def assert_in_use(result: Any) -> None:
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, line.startswith("error: the disk folder")) == (2, True)
    assert f"in use by the engine with process id {os.getpid()}" in line


def test_one_export_at_a_time(fill: Fill, run: Any, tmp_path: Path) -> None:
    """A second export would write into the same file; the data of the first one stays whole."""
    source, target = fill(REFS, name="source"), tmp_path / "b.kvpack"
    with PackWriter(target, Source(source).shards):
        result = run("pack", "export", "--folder", source, "-o", target, "--prompts", source)
        assert (result.exit_code, "is being written by another export" in result.stderr) == (2, True)
        with pytest.raises(ConfigError, match="another export"):
            PackWriter(target, Source(source).shards)
    assert run("pack", "export", "--folder", source, "-o", target).exit_code == 0


def test_no_worker_of_a_pack_is_imported_where_one_is_in_use(fill: Fill, run: Any, tmp_path: Path) -> None:
    for rank in range(2):
        fill(REFS, name=f"source/rank-{rank}-of-2", namespace=Namespace({"model": "mine", "shard": f"tp {rank}/2"}))
    export(Source(tmp_path / "source"), tmp_path / "two.kvpack")
    target = tmp_path / "target"
    make_folder(target / "rank-1-of-2")
    lock = FolderLock(target / "rank-1-of-2")
    assert_in_use(run("pack", "import", tmp_path / "two.kvpack", "--folder", target))
    with pytest.raises(FolderOwnedError):
        import_pack(tmp_path / "two.kvpack", Target((target,)))
    assert not (target / "rank-0-of-2").exists()
    lock.release()
    assert run("pack", "import", tmp_path / "two.kvpack", "--folder", target).exit_code == 0
