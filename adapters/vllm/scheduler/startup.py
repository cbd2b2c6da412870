"""Block of lines in vLLM's log when the cache is ready, logged once by the scheduler side."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.adapters.vllm.scheduler.shards import unreached
from kvstore.model.version import __version__

if TYPE_CHECKING:
    from kvstore.adapters.vllm.plan import WorkerFacts
    from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
    from kvstore.config import StoreConfig
    from kvstore.config.loader import LoadedConfig
    from kvstore.index.index import ChunkIndex

logger = logging.getLogger(__name__)

_GIB: Final = 2**30
_WHEN: Final = {None: "in the background if that is faster", True: "in the background", False: "within a step"}


@dataclass(frozen=True)
class Surroundings:
    """Environment of the cache.

    Attributes:
        vllm_version: version of the vLLM that runs it.
        role: vLLM's ``kv_role``.
        failure_policy: vLLM's ``kv_load_failure_policy``.
    """

    vllm_version: str
    role: str
    failure_policy: str


def log_start(
    loaded: LoadedConfig,
    options: SchedulerOptions,
    around: Surroundings,
    index: ChunkIndex | None,
    facts: Sequence[WorkerFacts],
) -> None:
    """Log one block once the workers' facts are known, as a warning if a tier cannot be used."""
    found = len(index) if index is not None else 0
    level = logging.WARNING if _problems_of(facts) or _unasked(loaded.config, facts) else logging.INFO
    logger.log(level, "%s", "\n".join(startup_lines(loaded, options, around, facts, found)))


def _problems_of(facts: Sequence[WorkerFacts]) -> list[str]:
    """Return the reasons why remote tiers cannot be used now, each once."""
    return list(dict.fromkeys(rank.remote_problem for rank in facts if rank.remote_problem))


def _unasked(config: StoreConfig, facts: Sequence[WorkerFacts]) -> list[int]:
    """Return the workers for which the shared tier cannot be asked, as they are on other hosts."""
    return unreached(facts) if config.shared_url is not None and not config.listens else []


def startup_lines(
    loaded: LoadedConfig,
    options: SchedulerOptions,
    around: Surroundings,
    facts: Sequence[WorkerFacts],
    num_chunks: int,
) -> Iterator[str]:
    """Yield the block, with a line for each setting that may be wrong and without passwords.

    Args:
        loaded: the configuration.
        options: options derived from it and from vLLM's flags.
        around: the environment of the cache.
        facts: the workers' facts.
        num_chunks: number of chunks found on disk.
    """
    yield f"version {__version__} in vLLM {around.vllm_version}"
    yield f"configuration: {', '.join(_sources(loaded.origins)) or 'defaults only'}"
    rules = options.load_rules_for(len(facts))
    layerwise = ", layer by layer" if rules.layerwise else ""
    yield (
        f"vLLM asks for: kv_role {around.role}, kv_load_failure_policy {around.failure_policy}; loads "
        f"{_WHEN[rules.async_load]}{layerwise}, stores {_WHEN[options.async_save]}"
    )
    yield from _places(loaded, facts, num_chunks)
    ids = list(dict.fromkeys(rank.namespace.id.hex() for rank in facts))
    others = f", and {len(ids) - 1} more for the other ranks" if len(ids) > 1 else ""
    yield f"namespace {ids[0]}{others}"


def _sources(origins: Mapping[str, str]) -> list[str]:
    """Return the origins of values: the file once, then each variable and each key of vLLM's extra config."""
    found = (where.partition(", line ")[0].partition(", in ")[0] for where in origins.values() if where != "default")
    return sorted(dict.fromkeys(found), key=lambda where: not where.startswith("file "))


def _places(loaded: LoadedConfig, facts: Sequence[WorkerFacts], num_chunks: int) -> Iterator[str]:
    config, shown = loaded.config, loaded.config.shown()
    passage = "" if config.local_cpu else ", for staging only: local_cpu is false"
    if len({rank.host for rank in facts}) > 1:
        yield "workers on several hosts: each uses the memory, folders and local addresses of its own"
    yield f"memory: {_bound(facts[0].num_slots * facts[0].slot_bytes, len(facts))}{passage}"
    if facts[0].gpu_bytes:
        yield f"GPU: {_bound(facts[0].gpu_bytes, len(facts))}"
    if config.local_disk_folders:
        bound = _bound(facts[0].disk_capacity_bytes, len(facts))
        yield f"disk {', '.join(config.local_disk_folders)}: {bound}, {num_chunks:,} chunks found"
    problems = _problems_of(facts)
    state = f"NOT USED: {'; '.join(problems)}; it is tried again" if problems else "answers"
    if config.listens:
        yield f"remote tier: the server that each worker opens for other engines{', ' + state if problems else ''}"
    if config.shared_url is not None:
        only_read = ", which is only read" if config.listens else ""
        if unasked := _unasked(config, facts):
            state = f"NOT USED: worker {unasked[0]} has its own on another host, which nobody asks: set remote_host_url"
        yield f"remote tier {shown['remote_url']}{only_read}: {state}"
    if config.peers:
        yield f"peers, which are only read: {', '.join(str(url) for url in _listed(shown['peers']))}"
    if facts[0].divisions:
        sizes = " and ".join(str(division.size) for division in facts[0].divisions)
        yield f"also read: chunks that engines of tensor-parallel size {sizes} have stored"


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _bound(size_bytes: int, num_workers: int) -> str:
    each = f" ({size_bytes / _GIB:.2f} GiB for each of {num_workers} workers)" if num_workers > 1 else ""
    return f"at most {num_workers * size_bytes / _GIB:.2f} GiB{each}"
