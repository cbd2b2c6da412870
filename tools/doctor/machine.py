"""Checks that this machine supports a configuration. Each warning and error has a remedy."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

from kvstore.adapters.vllm.glue.interface import TESTED, is_tested
from kvstore.config import StoreConfig
from kvstore.memory.limits import available_memory_bytes
from kvstore.model.errors import ConfigError, FolderOwnedError, KVStoreError
from kvstore.tiers.disk.folder import LOCK_FILE, FolderLock, make_folder, probe_direct
from kvstore.tiers.disk.survey import held_bytes
from kvstore.tools.console import size
from kvstore.tools.doctor.findings import Finding, State
from kvstore.tools.doctor.remote import elsewhere, needed_packages
from kvstore.tools.workers import Workers

GIB = 1 << 30
MOST_OF_MEMORY = 0.9  # vLLM and the page cache of the weights need the rest
_PROBE_BYTES = 64 << 20
_PROBES = 4
_MIN_OPEN_FILES = 4096


def diagnose(
    config: StoreConfig, *, workers: Workers, bytes_per_token: int, prefill_tokens_per_s: float, starts: bool = False
) -> Iterator[Finding]:
    """Check everything that a configuration needs.

    Args:
        config: the configuration to check.
        workers: workers of the engine, one per GPU; each has a pool and a folder.
        bytes_per_token: KV bytes of a token, for each worker.
        prefill_tokens_per_s: prefill speed of the model; loading must be faster.
        starts: the engine is about to start, so a folder in use is an error.
    """
    yield from _software(config)
    yield _memory(config, workers.count)
    yield _open_files()
    needed_bytes_per_s = bytes_per_token * prefill_tokens_per_s
    for folder in config.local_disk_folders:
        share_bytes_per_s = needed_bytes_per_s / len(config.local_disk_folders)
        yield from _folder(Path(folder), config, workers, share_bytes_per_s, starts=starts)
    yield from needed_packages(config)
    yield from elsewhere(config)


def _software(config: StoreConfig) -> Iterator[Finding]:
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        yield Finding("vLLM", "warning", "not installed here", f"pip install 'vllm=={TESTED[-1]}.*'")
        return
    if is_tested(version):
        yield Finding("vLLM", "ok", version)
    elif config.allow_untested_vllm:
        remedy = (
            f"tested are {', '.join(TESTED)}; another one is examined at start, and served if it has all that is used"
        )
        yield Finding("vLLM", "warning", f"{version} has not been tested", remedy)
    else:
        remedy = f"install vLLM {' or '.join(TESTED)}: allow_untested_vllm is false"
        yield Finding("vLLM", "error", f"{version} has not been tested", remedy)
    layout = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    if layout:
        found = f"VLLM_KV_CACHE_LAYOUT={layout}"
        yield Finding("layout", "warning", found, "set it for all vLLMs that share chunks, or for none")
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


def _folder(
    base: Path, config: StoreConfig, workers: Workers, needed_bytes_per_s: float, *, starts: bool
) -> Iterator[Finding]:
    topic = f"disk {base}"
    folders = workers.folders(base)
    with ExitStack() as locked:
        try:
            make_folder(folders[0])
            for folder in folders:
                if folder == folders[0] or (folder / LOCK_FILE).exists():
                    locked.callback(FolderLock(folder).release)
        except FolderOwnedError as error:
            if starts:
                yield Finding(
                    topic, "error", str(error), "vLLM would not start: stop that engine, or name another local_disk"
                )
            else:
                yield Finding(topic, "warning", str(error), "stop that engine to measure the disk")
            return
        except ConfigError as error:
            yield Finding(topic, "error", str(error), "name another local_disk")
            return
        try:
            yield _room(topic, folders, config.max_local_disk_bytes * workers.count // len(config.local_disk_folders))
            is_direct = probe_direct(folders[0])
            if is_direct:
                yield Finding(topic, "ok", "O_DIRECT works")
            else:
                remedy = (
                    "use a local ext4 or xfs: here, reads go through the page cache and compete with vLLM for memory"
                )
                state: State = "error" if config.use_odirect else "warning"
                yield Finding(topic, state, "O_DIRECT does not work", remedy)
            yield _speed(topic, folders[0], needed_bytes_per_s, is_direct=is_direct)
        except (KVStoreError, OSError) as error:
            yield Finding(topic, "error", str(error), "name another local_disk")


def _room(topic: str, folders: Sequence[Path], wanted_bytes: int) -> Finding:
    status = os.statvfs(folders[0])
    held = sum(held_bytes(folder) for folder in folders if folder.is_dir())
    room_bytes = status.f_bavail * status.f_frsize + held
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
        needed = f"computing makes {needed_bytes_per_s / 1e9:.2f} GB/s"
        remedy = "use a faster disk, several folders, or local_disk_serde: split; or see --prefill-tokens-per-s"
        return Finding(topic, "warning", f"{found}; {needed}", remedy)
    return Finding(topic, "ok", found)


def measure_disk(folder: Path, *, is_direct: bool, probe_bytes: int = _PROBE_BYTES) -> tuple[float, float]:
    """Write and read a file a few times on one thread, and return the median speeds in bytes per second.

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
