"""Checks of the flags of ``vllm serve`` against the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.config import LoadedConfig, StoreConfig
from kvstore.config.schema import PD_ROLES
from kvstore.model.errors import ConfigError
from kvstore.tools.doctor.findings import Finding
from kvstore.tools.doctor.flags import our_part
from kvstore.tools.processes import is_listening
from kvstore.tools.vllmflags import ServeFlags

_USUAL_BLOCK_TOKENS: Final = 16
_DEFAULT = "default"
_LAST_PORT: Final = 65_535


def check_sources(loaded: LoadedConfig) -> Iterator[Finding]:
    """Report the sources of the configuration, and its ignored settings."""
    places = Counter(map(_source, (origin for origin in loaded.origins.values() if origin != _DEFAULT)))
    if places:
        yield Finding("configuration", "ok", ", ".join(f"{count} keys from {place}" for place, count in places.items()))
    else:
        found = (
            f"none is given: {StoreConfig().max_local_cpu_size:g} GiB of memory for each worker, no disk, no sharing"
        )
        remedy = "name a file by --config or KVSTORE_CONFIG_FILE, or pass what kvstore flags prints behind --"
        yield Finding("configuration", "warning", found, remedy)
    for warning in loaded.warnings:
        yield Finding("configuration", "warning", warning, "correct it, or leave it out")


def _source(origin: str) -> str:
    if origin.startswith("kv_connector_extra_config"):
        return "the flags"
    return "the environment" if origin.startswith("environment") else origin.partition(",")[0]


def check_together(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    """Check that vLLM, started with these flags, supports the configuration."""
    yield _workers(flags)
    yield from _blocks(flags, config)
    yield from _end(flags, config)
    yield from _handover(flags, config)
    yield from _listening(flags, config)
    yield from _scheduling(flags, config)
    yield from _identity(flags, config)
    yield from _device(flags, config)
    if flags.given.get("--enable-prompt-embeds"):
        found = "prompts given as embeddings have no tokens: they are neither stored nor found"
        yield Finding("prompt embeddings", "warning", found, "nothing, if only some prompts are")


def _workers(flags: ServeFlags) -> Finding:
    workers = flags.workers
    split = [name for name in ("-dcp", "-pcp") if flags.number(name) > 1]
    if split:
        found = f"{' and '.join(split)}: context parallelism splits a block over workers, which is not supported"
        return Finding("workers", "error", found, "leave it out: see docs/parallelism.md")
    sizes = f"tensor {flags.number('-tp')} x pipeline {flags.number('-pp')} x data {workers.replicas}"
    return Finding("workers", "ok", f"{workers.count} here: {sizes}; sizes are for each of them")


def _blocks(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    block_tokens = flags.given.get("--block-size")
    if block_tokens is not None and block_tokens < 1:
        yield Finding("blocks", "error", f"--block-size is {block_tokens}", "leave it out, or give 16")
        return
    tokens = block_tokens or _USUAL_BLOCK_TOKENS
    whose = f"--block-size {tokens}" if block_tokens else f"vLLM's usual block of {tokens} tokens"
    rest = config.chunk_size % tokens
    if 0 < config.max_tokens_per_load < tokens:
        found = f"max_tokens_per_load {config.max_tokens_per_load} is less than {whose}: nothing would be loaded"
        yield Finding("blocks", "error", found, "raise max_tokens_per_load, or set it to 0")
    elif rest:
        fitting = config.chunk_size - rest + tokens
        found = f"chunk_size {config.chunk_size} is no multiple of {whose}: {fitting} would be used"
        yield Finding("blocks", "warning", found, f"set chunk_size: {fitting}")
    else:
        yield Finding("blocks", "ok", f"chunk_size {config.chunk_size} is a multiple of {whose}")


def _end(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    if not (config.local_disk or config.has_remote):
        return
    timeout_s = flags.given.get("--shutdown-timeout", 0)
    if timeout_s:
        yield Finding("shutdown", "ok", f"{timeout_s:g} s to write what is on its way")
    else:
        found = "--shutdown-timeout is 0: what is on its way to disk or elsewhere is lost when vLLM ends"
        yield Finding("shutdown", "warning", found, "add --shutdown-timeout 30")


def _handover(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    role = ((flags.transfer and our_part(flags.transfer)) or {}).get("kv_role")
    if config.enable_pd and config.pd_role is not None and role is not None and PD_ROLES[config.pd_role] != role:
        found = f"pd_role {config.pd_role} is ignored, as kv_role is {role}"
        yield Finding("hand-over", "warning", found, f"write kv_role {PD_ROLES[config.pd_role]}, or leave pd_role out")
    elif role in ("kv_producer", "kv_consumer") and not (config.enable_pd or config.has_remote):
        found = f"kv_role is {role}, and nothing is shared with another engine"
        remedy = "set enable_pd or remote_url, as kvstore flags --role does; or write kv_role kv_both"
        yield Finding("hand-over", "warning", found, remedy)
    elif config.enable_pd and role == "kv_consumer" and not (config.listens or config.shared_url):
        found = "enable_pd is set, and this engine has nowhere to receive KV"
        yield Finding("hand-over", "error", found, "set pd_peer_init_port, or remote_url: see docs/disaggregation.md")


def _listening(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    """Check the ports and keys of the servers that workers open."""
    ports = config.pd_peer_init_port
    if not config.listens or ports is None:
        return
    count = flags.workers.count
    if isinstance(ports, tuple) and len(ports) < count:
        found = f"pd_peer_init_port has {len(ports)} ports for {count} workers"
        yield Finding("ports", "error", found, "add a port for each worker")
        return
    wanted = ports[:count] if isinstance(ports, tuple) else range(ports, ports + count)
    if wanted[-1] > _LAST_PORT:
        found = (
            f"{count} workers from port {wanted[0]} on need ports up to {wanted[-1]}: the last there is is {_LAST_PORT}"
        )
        yield Finding("ports", "error", found, "set a lower pd_peer_init_port")
        return
    taken = [port for port in wanted if is_listening(port)]
    if taken:
        found = f"another process listens at {', '.join(map(str, taken))}"
        yield Finding("ports", "error", found, "stop it, or set another pd_peer_init_port")
    else:
        yield Finding("ports", "ok", f"{len(wanted)} from {wanted[0]} on")
    yield from _keys(config)


def _keys(config: StoreConfig) -> Iterator[Finding]:
    if config.server_key_file is None:
        return
    try:
        from kvstore.protocol.keyfiles import read_list, read_pair  # noqa: PLC0415 - an extra

        read_pair(Path(config.server_key_file))
        clients = read_list(Path(config.server_clients)) if config.server_clients else {}
    except (ConfigError, ImportError) as error:
        yield Finding("keys", "error", str(error), "make them with kvstore keygen: see docs/server.md")
    else:
        yield Finding("keys", "ok", f"{len(clients)} clients may connect")


def _scheduling(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    waits = config.enable_async_loading is False and (config.local_disk or config.has_remote)
    if waits and flags.given.get("--async-scheduling") is not False:
        found = "enable_async_loading is false, and vLLM schedules asynchronously: vLLM would not start"
        yield Finding("scheduling", "error", found, "leave enable_async_loading at auto, or add --no-async-scheduling")


def _identity(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    if flags.given.get("--load-format") == "dummy" and config.model_id is None:
        found = "--load-format dummy: nothing identifies the weights, so vLLM would not start"
        yield Finding("model", "error", found, "set model_id")


def _device(flags: ServeFlags, config: StoreConfig) -> Iterator[Finding]:
    if not config.max_local_gpu_size:
        return
    share = flags.given.get("--gpu-memory-utilization")
    found = f"max_local_gpu_size takes {config.max_local_gpu_size:g} GiB of each GPU beside what vLLM takes"
    if share is None:
        yield Finding("GPU memory", "warning", found, "lower --gpu-memory-utilization by as much, from 0.9")
    else:
        yield Finding("GPU memory", "ok", f"{found}, {share:g} of all")
    if flags.given.get("--enable-sleep-mode"):
        remedy = "use vLLM 0.33, leave max_local_gpu_size at 0, or leave --enable-sleep-mode out"
        yield Finding("GPU memory", "warning", "a vLLM before 0.33 may not sleep with max_local_gpu_size", remedy)
