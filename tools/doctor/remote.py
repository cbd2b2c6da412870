"""Checks of the remote tier and peers of a configuration, and of the packages to reach them."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from urllib.parse import urlsplit

from kvstore.config import StoreConfig
from kvstore.config.keys.remote import HOST_MARK
from kvstore.config.schema import hide_login
from kvstore.format.codecs import open_codec
from kvstore.format.sealing import open_ring
from kvstore.model.errors import ConfigError, KVStoreError, TierSetupError
from kvstore.model.layout import KVLayout
from kvstore.tiers import load_tier, tier_behind
from kvstore.tools.console import size
from kvstore.tools.doctor.findings import Finding, State

_BAD_POLICIES = ("noeviction", "allkeys-random", "volatile-random")
_MIN_REDIS = (6, 0)
_MOST_WAIT_S = 5.0
_MAX_PINGED = 8  # of the peers of one URL; a silent one takes seconds
_FAR = ("192.0.2.1", 9)  # an address for documentation, which is on no network here
_LET_IN = {
    True: "give it this engine's public key in its server_clients, and this engine its own in remote_server_key_file",
    False: "it may want keys: set remote_key_file and remote_server_key_file; or it hangs, or is no cache server",
}
_ANY_LAYOUT = KVLayout(
    page_bytes=(4096,), planes=1, block_tokens=16, chunk_tokens=16, element="bf16", page_axes=(1, 16, 128)
)


def needed_packages(config: StoreConfig) -> Iterator[Finding]:
    """Check the packages of extras that the configuration needs, for codecs and for servers."""
    for key, codec in (("local_disk_serde", config.local_disk_serde), ("remote_serde", config.remote_codec)):
        if codec == "none":
            continue
        try:
            open_codec(codec, _ANY_LAYOUT)
        except ConfigError as error:
            yield Finding(
                f"codec {codec}", "error", str(error), f"pip install 'vllm-kvstore[codecs]', or leave {key} out"
            )
        else:
            yield Finding(f"codec {codec}", "ok", f"{key} can be used")
    if config.encryption_keys is not None:
        try:
            open_ring(config.encryption_keys)
        except ConfigError as error:
            yield Finding(
                "encryption_keys", "error", str(error), "see docs/encryption.md, or leave encryption_keys out"
            )
        else:
            yield Finding("encryption_keys", "ok", f"the keys in {config.encryption_keys} can be used")
    wanted = {
        "internal_api_server_enabled": ("admin", ("starlette", "uvicorn"), config.internal_api_server_enabled),
        "server_http_port": ("server", ("starlette", "uvicorn"), config.server_http_port is not None),
        "server_listen": ("server", ("zmq", "msgspec"), config.server_listen is not None),
        "enable_pd": ("server", ("zmq", "msgspec"), config.enable_pd),
        "peers": ("server", ("zmq", "msgspec"), bool(config.peers)),
    }
    for key, (extra, modules, is_wanted) in wanted.items():
        missing = [module for module in modules if is_wanted and not _can_import(module)]
        if missing:
            found = f"{key} needs {' and '.join(missing)}, which cannot be imported"
            yield Finding(key, "error", found, f"pip install 'vllm-kvstore[{extra}]'")


def elsewhere(config: StoreConfig) -> Iterator[Finding]:
    """Check the shared tier, and the peers."""
    if config.remote_url is not None and config.shared_url is None:
        found = "remote_url names a tier that only LMCache has"
        yield Finding("remote tier", "warning", found, "use redis://, see docs/redis.md")
    elif config.shared_url is not None:
        yield from _shared(config, config.shared_url)
    if config.remote_host_url is not None:
        yield _own_server(config, config.remote_host_url)
    for url in config.fixed_peers:
        yield _cache_server(f"peer {url}", url, config, is_required=False)
    for url in config.watched_peers:
        yield from _watched(config, url)


def _shared(config: StoreConfig, url: str) -> Iterator[Finding]:
    name = tier_behind(url)
    try:
        load_tier(name)
    except ConfigError as error:
        yield Finding("remote tier", "error", str(error), "install what is missing")
        return
    if name == "redis":
        yield from _redis(config)
    elif name == "server":
        yield _cache_server("cache server", url, config, is_required=config.remote_required)
    elif name == "members":
        yield from _cache_servers(config, url)
    elif name == "pack":
        yield _pack(url)
    elif name == "object":
        yield from _objects(config, url)
    elif name == "mooncake":
        yield from _mooncake(config, url)
    else:
        yield Finding("remote tier", "ok", f"the tier {name!r} is installed; only a start shows whether it works")


def _can_import(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def _pack(url: str) -> Finding:
    from kvstore.format.pack import open_pack  # noqa: PLC0415
    from kvstore.tiers.pack import path_of  # noqa: PLC0415

    try:
        with open_pack(path_of(url)) as pack:
            chunks = sum(len(extents) for extents in pack.extents)
    except ConfigError as error:
        return Finding("pack", "error", str(error), "correct remote_url, or copy the pack again")
    return Finding("pack", "ok", f"{chunks:,} chunks; kvstore verify reads them")


def _cache_server(topic: str, url: str, config: StoreConfig, *, is_required: bool) -> Finding:
    """Check that a cache server answers this engine."""
    try:
        load_tier("server")
    except ConfigError as error:
        return Finding(topic, "error", str(error), "install what is missing")
    from kvstore.tiers.server.operator import Operator  # noqa: PLC0415 - an extra
    from kvstore.tiers.server.url import parse_server  # noqa: PLC0415

    keys = {"client_key_file": config.remote_key_file, "server_key_file": config.remote_server_key_file}
    timeout_s = min(config.blocking_timeout_secs, _MOST_WAIT_S)
    down: State = "error" if is_required else "warning"
    begin_s = time.perf_counter()
    try:
        with closing(Operator(parse_server(url, {"timeout_s": timeout_s, **keys}))) as operator:
            status = operator.ping()
    except ConfigError as error:  # includes TierSetupError, if the server rejects this request
        return Finding(topic, "error", str(error), "correct its URL, or the key files")
    except KVStoreError as error:
        if _listens(url):
            return Finding(
                topic, "error", "listens, and does not answer this engine", _LET_IN[bool(config.remote_key_file)]
            )
        return Finding(topic, down, str(error), "start it, or correct its URL: until then nothing is shared")
    if status != "ok":
        return Finding(topic, down, f"says {status!r}", "start it again")
    return Finding(topic, "ok", f"answers in {1e3 * (time.perf_counter() - begin_s):.1f} ms, the connection included")


def _own_server(config: StoreConfig, template: str) -> Finding:
    """Check the address at which other hosts of the engine reach this host's tier; theirs are known when they run."""
    topic, address = "remote_host_url", _own_address()
    if HOST_MARK not in template:
        remedy = f"write {HOST_MARK} where the address of each host belongs: kvs://{HOST_MARK}:5566"
        return Finding(topic, "warning", "names the same place for every host of the engine", remedy)
    url = template.replace(HOST_MARK, f"[{address}]" if ":" in address else address)
    if tier_behind(url) != "server":
        return Finding(topic, "ok", f"is {hide_login(url)} on this host; run doctor on each host to check the others")
    found = _cache_server(topic, url, config, is_required=config.remote_required)
    remedy = found.remedy and f"{found.remedy}; its server_listen must name that address and port"
    said = f"at {address}, this host's address: {found.found}; run doctor on each other host, too"
    return replace(found, found=said, remedy=remedy)


def _own_address() -> str:
    """Return the address that vLLM takes for this host's, unless it is told another one."""
    if address := os.environ.get("VLLM_HOST_IP"):
        return address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(_FAR)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _watched(config: StoreConfig, url: str) -> Iterator[Finding]:
    """Check that each peer that DNS or a file names now answers this engine; one of them may be this engine."""
    from kvstore.tiers.members.addresses import MAX_MEMBERS, parse_members  # noqa: PLC0415 - an extra

    topic, remedy = f"peers {hide_login(url)}", "correct peers, or what it names: until then none of these is read"
    try:
        members = parse_members(url)
        found = sorted(members.find())
    except ConfigError as error:
        yield Finding(topic, "error", str(error), remedy)
        return
    except KVStoreError as error:
        yield Finding(topic, "warning", str(error), remedy)
        return
    if not found:
        yield Finding(topic, "warning", "names no engine now", "start them; they are noticed within 10 s")
        return
    named = f"names {len(found)} engines now, and is asked again every few seconds"
    fits = len(found) <= MAX_MEMBERS
    yield Finding(topic, "ok" if fits else "warning", named, "" if fits else f"name {MAX_MEMBERS} at most")
    for member in found[:_MAX_PINGED]:
        place = f"{member.url}?{members.query}" if members.query else member.url
        yield _cache_server(f"peer {member.name}", place, config, is_required=False)


def _cache_servers(config: StoreConfig, url: str) -> Iterator[Finding]:
    """Check that each of several cache servers answers this engine."""
    from kvstore.tiers.members.addresses import parse_members  # noqa: PLC0415 - an extra

    down: State = "error" if config.remote_required else "warning"
    try:
        members = parse_members(url).find()
    except ConfigError as error:
        yield Finding("cache servers", "error", str(error), "correct remote_url, or the file that it names")
        return
    except KVStoreError as error:
        yield Finding("cache servers", down, str(error), "correct remote_url, or what it names")
        return
    if not members:
        yield Finding("cache servers", down, "remote_url leads to none", "start them, or correct what it names")
    for member in members:
        yield _cache_server(f"cache server {member.name}", member.url, config, is_required=False)


def _listens(url: str) -> bool:
    """Tell if a process accepts connections at the host and port of a server's URL."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        return False
    try:
        with socket.create_connection((parts.hostname, parts.port), _MOST_WAIT_S):
            return True
    except OSError:
        return False


def _objects(config: StoreConfig, url: str) -> Iterator[Finding]:
    """Check that a store of objects can be written, read, listed and deleted from, by one small object."""
    from kvstore.tiers.object.names import PROBES, probe_name  # noqa: PLC0415 - only if it is configured
    from kvstore.tiers.object.tier import open_store  # noqa: PLC0415
    from kvstore.tiers.object.url import parse_target  # noqa: PLC0415

    down: State = "error" if config.remote_required else "warning"
    begin_s = time.perf_counter()
    name = probe_name()
    try:
        with closing(open_store(parse_target(url, {"timeout_s": _MOST_WAIT_S}))) as store:
            store.write(name, b"kvstore")
            found, listed = store.read(name, 64), [one.name for one in store.list(PROBES)]
            store.delete([name])
    except TierSetupError as error:
        yield Finding("objects", "error", str(error), "correct the credentials, the bucket's name, or tls_ca")
        return
    except ConfigError as error:
        yield Finding("objects", "error", str(error), "correct remote_url")
        return
    except KVStoreError as error:
        yield Finding("objects", down, str(error), "see if it is up and mounted: until then nothing is shared")
        return
    if found != b"kvstore" or name not in listed:
        yield Finding("objects", "error", "an object that was written is not there", "use a store that is consistent")
        return
    shown = f"written, read, listed and deleted in {1e3 * (time.perf_counter() - begin_s):.1f} ms"
    yield Finding("objects", "ok", f"{shown}; kvstore sweep keeps a bound")


def _mooncake(config: StoreConfig, url: str) -> Iterator[Finding]:
    """Check that a Mooncake Store answers, and how much memory it has."""
    from kvstore.tiers.mooncake.inventory import answer_s, segments  # noqa: PLC0415 - only if it is configured
    from kvstore.tiers.mooncake.url import parse_target  # noqa: PLC0415

    down: State = "error" if config.remote_required else "warning"
    try:
        target = parse_target(url, {"timeout_s": _MOST_WAIT_S})
        found = f"the master answers in {1e3 * answer_s(target):.1f} ms"
    except ConfigError as error:
        yield Finding("Mooncake", "error", str(error), "correct remote_url, or install what is missing")
        return
    except KVStoreError as error:
        yield Finding("Mooncake", down, str(error), "start its master, or correct remote_url: nothing is shared")
        return
    yield Finding("Mooncake", "ok", f"{found}; it has no authentication, so keep its network closed")
    try:
        owned = segments(target)
    except KVStoreError as error:
        yield Finding("Mooncake segments", "warning", str(error), "or ignore it: only tools read them")
        return
    free_bytes = sum(one.capacity_bytes - one.used_bytes for one in owned)
    told = f"{len(owned)} hosts give {size(sum(one.capacity_bytes for one in owned))}, {size(free_bytes)} are free"
    if owned:
        yield Finding("Mooncake segments", "ok", told)
    else:
        yield Finding("Mooncake segments", down, "no host gives memory", "start one, or set segment_mib in remote_url")


def _redis(config: StoreConfig) -> Iterator[Finding]:
    from kvstore.tiers.redis.inventory import RedisInventory  # noqa: PLC0415 - the tier could be loaded, so redis-py is there

    options = {"username": config.remote_username, "password": config.remote_password}
    try:
        with closing(RedisInventory(str(config.shared_url), options)) as inventory:
            begin_s = time.perf_counter()
            inventory.ask_servers("PING")
            found = f"answers in {1e3 * (time.perf_counter() - begin_s):.1f} ms, the connection included"
            yield Finding("Redis", "ok", found)
            for place, info in inventory.ask_servers("INFO").items():
                yield from _redis_server(f"Redis {place}", info)
    except TierSetupError as error:  # it is there: to start it again would not help
        yield Finding(
            "Redis", "error", str(error), "correct remote_username and remote_password, or what remote_url says"
        )
    except ConfigError as error:
        yield Finding("Redis", "error", str(error), "correct remote_url")
    except KVStoreError as error:
        down: State = "error" if config.remote_required else "warning"
        yield Finding("Redis", down, str(error), "start it, or correct remote_url: until then nothing is shared")


def _redis_server(topic: str, info: object) -> Iterator[Finding]:
    """Check the version, memory limit and eviction policy of a Redis server."""
    if not isinstance(info, bytes):
        yield Finding(topic, "warning", "does not show its settings", "grant the user +info to have them checked")
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
