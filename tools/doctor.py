"""``kvstore doctor``: whether this machine can do what a configuration asks. Each finding has a remedy."""

from __future__ import annotations

import mmap
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, FolderOwnedError, KVStoreError
from kvstore.hostlimits import available_memory_bytes
from kvstore.tiers import leads_to
from kvstore.tiers._folder import FolderLock, make_folder, probe_direct
from kvstore.tiers._survey import held_bytes
from kvstore.tools.console import size
from kvstore.versions import TESTED_VLLM

State = Literal["ok", "warning", "error"]

GIB = 1 << 30
MOST_OF_MEMORY = 0.9  # vLLM, and the page cache of the weights, want some
_PROBE_BYTES = 64 << 20
_PROBES = 4
_MIN_OPEN_FILES = 4096
_BAD_POLICIES = ("noeviction", "allkeys-random", "volatile-random")
_MIN_REDIS = (6, 0)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it."""

    topic: str
    state: State
    found: str
    remedy: str = ""


def diagnose(
    config: StoreConfig, *, workers: int, bytes_per_token: int, prefill_tokens_per_s: float
) -> Iterator[Finding]:
    """Look at everything that a configuration needs, one finding after the other.

    Args:
        config: what is to run.
        workers: processes with a pool and a folder each: one a GPU.
        bytes_per_token: of KV, for each worker.
        prefill_tokens_per_s: how fast the model computes: loading must be faster.
    """
    yield from _software()
    yield _memory(config, workers)
    yield _open_files()
    needed_bytes_per_s = bytes_per_token * prefill_tokens_per_s
    for folder in config.local_disk_folders:
        yield from _folder(Path(folder), config, workers, needed_bytes_per_s / len(config.local_disk_folders))
    url = config.remote_url
    if url is None:
        return
    if config.shared_url is None:
        yield Finding(
            "remote tier", "warning", "remote_url names a tier of LMCache's", "use redis://, see docs/redis.md"
        )
    elif leads_to(url, "redis"):
        yield from _redis(config)


def _software() -> Iterator[Finding]:
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        yield Finding("vLLM", "warning", "not installed here", f"pip install 'vllm=={TESTED_VLLM}*'")
        return
    if version.startswith(TESTED_VLLM):
        yield Finding("vLLM", "ok", version)
    else:
        remedy = f"install vllm {TESTED_VLLM}x: another version is refused at start"
        yield Finding("vLLM", "error", f"{version} has not been tested", remedy)
    layout = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    if layout:
        found = f"VLLM_KV_CACHE_LAYOUT={layout}"
        yield Finding("layout", "warning", found, "set it for every vLLM that shares chunks, or for none")
    else:
        yield Finding("layout", "ok", "vLLM chooses it; engines that share chunks need the same backend")


def _memory(config: StoreConfig, workers: int) -> Finding:
    limit = available_memory_bytes()
    wanted = config.host_memory_bytes * workers
    found = f"{size(wanted)} wanted for {workers} worker(s), {size(limit.available_bytes)} left ({limit.decided_by})"
    if wanted > limit.available_bytes:
        return Finding("memory", "error", found, "lower max_local_cpu_size, or give the container more memory")
    if wanted > MOST_OF_MEMORY * limit.available_bytes:
        return Finding("memory", "warning", found, "leave a tenth to vLLM itself: lower max_local_cpu_size")
    return Finding("memory", "ok", found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_OPEN_FILES:
        remedy = f"ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
        return Finding("open files", "warning", f"at most {soft:,}", remedy)
    return Finding("open files", "ok", f"at most {soft:,}")


def _folder(folder: Path, config: StoreConfig, workers: int, needed_bytes_per_s: float) -> Iterator[Finding]:
    topic = f"disk {folder}"
    try:
        make_folder(folder)
        lock = FolderLock(folder)
    except FolderOwnedError as error:
        yield Finding(topic, "warning", str(error), "stop that engine to have the disk measured")
        return
    except ConfigError as error:
        yield Finding(topic, "error", str(error), "name another local_disk")
        return
    try:
        yield _room(topic, folder, config.max_local_disk_bytes * workers // len(config.local_disk_folders))
        is_direct = probe_direct(folder)
        if is_direct:
            yield Finding(topic, "ok", "O_DIRECT works")
        else:
            remedy = "use a local ext4 or xfs: reads go through the page cache here, and compete with vLLM for memory"
            yield Finding(topic, "error" if config.use_odirect else "warning", "O_DIRECT does not work", remedy)
        yield _speed(topic, folder, needed_bytes_per_s, is_direct=is_direct)
    except KVStoreError as error:
        yield Finding(topic, "error", str(error), "name another local_disk")
    finally:
        lock.release()


def _room(topic: str, folder: Path, wanted_bytes: int) -> Finding:
    status = os.statvfs(folder)
    room_bytes = status.f_bavail * status.f_frsize + held_bytes(folder)
    found = f"{size(wanted_bytes)} wanted, {size(room_bytes)} there"
    if wanted_bytes > room_bytes:
        return Finding(topic, "error", found, "lower max_local_disk_size, or name another local_disk")
    return Finding(topic, "ok", found)


def _speed(topic: str, folder: Path, needed_bytes_per_s: float, *, is_direct: bool) -> Finding:
    try:
        write_bytes_per_s, read_bytes_per_s = measure_disk(folder, is_direct=is_direct)
    except OSError as error:
        return Finding(topic, "error", f"cannot be measured: {error.strerror}", "make room, or name another local_disk")
    found = f"writes {write_bytes_per_s / 1e9:.2f} GB/s, reads {read_bytes_per_s / 1e9:.2f} GB/s"
    if read_bytes_per_s < needed_bytes_per_s:
        needed = f"{needed_bytes_per_s / 1e9:.2f} GB/s are computed anew in the same time"
        remedy = "use a faster disk, several folders, or local_disk_serde: split; or see --prefill-tokens-per-s"
        return Finding(topic, "warning", f"{found}; {needed}", remedy)
    return Finding(topic, "ok", found)


def measure_disk(folder: Path, *, is_direct: bool, probe_bytes: int = _PROBE_BYTES) -> tuple[float, float]:
    """Write and read a file a few times, in one thread: the medians, in bytes a second.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    buffer = mmap.mmap(-1, probe_bytes)
    buffer.write(os.urandom(1 << 20) * (probe_bytes >> 20))
    view = memoryview(buffer)
    path = folder / ".free" / "doctor"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
    fd = os.open(path, flags, 0o600)
    try:
        writes, reads = [], []
        for _ in range(_PROBES):
            begin_s = time.perf_counter()
            _whole(os.pwritev(fd, [view], 0), probe_bytes)
            os.fdatasync(fd)
            writes.append(probe_bytes / (time.perf_counter() - begin_s))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            begin_s = time.perf_counter()
            _whole(os.preadv(fd, [view], 0), probe_bytes)
            reads.append(probe_bytes / (time.perf_counter() - begin_s))
        return sorted(writes)[_PROBES // 2], sorted(reads)[_PROBES // 2]
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _whole(moved_bytes: int, wanted_bytes: int) -> None:
    if moved_bytes != wanted_bytes:
        raise OSError(28, os.strerror(28))


def _redis(config: StoreConfig) -> Iterator[Finding]:
    try:
        from kvstore.redis_shelf import RedisShelf  # noqa: PLC0415 - redis-py may not be installed
    except ImportError:
        yield Finding("Redis", "error", "redis-py is not installed", "pip install 'vllm-kvstore[redis]'")
        return
    options = {"username": config.remote_username, "password": config.remote_password}
    try:
        shelf = RedisShelf(str(config.shared_url), options)
    except KVStoreError as error:
        yield Finding("Redis", "error", str(error), "correct remote_url")
        return
    state: State = "error" if config.remote_required else "warning"
    try:
        begin_s = time.perf_counter()
        shelf.ask_servers("PING")
        found = f"answers in {1e3 * (time.perf_counter() - begin_s):.1f} ms, the connection included"
        yield Finding("Redis", "ok", found)
        for place, info in shelf.ask_servers("INFO").items():
            yield from _redis_server(f"Redis {place}", info)
    except KVStoreError as error:
        yield Finding("Redis", state, str(error), "start it, or correct remote_url and the password")
    finally:
        shelf.close()


def _redis_server(topic: str, info: object) -> Iterator[Finding]:
    """What one server says of itself."""
    if not isinstance(info, bytes):
        yield Finding(topic, "warning", "does not tell about itself", "grant the user +info to have it looked at")
        return
    said = dict(re.findall(r"^(\w+):(.*?)\r?$", info.decode(errors="replace"), re.MULTILINE))
    version = said.get("redis_version", "0.0")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _MIN_REDIS:
        yield Finding(topic, "error", f"version {version}", "use Redis 6.0 or later")
    policy, most_bytes = said.get("maxmemory_policy", ""), int(said.get("maxmemory", "0") or 0)
    found = f"version {version}, maxmemory {size(most_bytes) if most_bytes else 'unlimited'}, policy {policy}"
    if not most_bytes:
        yield Finding(topic, "warning", found, "set maxmemory: without it the server grows until it is killed")
    elif policy in _BAD_POLICIES:
        yield Finding(topic, "warning", found, "set maxmemory-policy allkeys-lru: see docs/redis.md")
    else:
        yield Finding(topic, "ok", found)
