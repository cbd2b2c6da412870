"""The keys of a configuration: their types, limits, defaults and meaning.

The names are LMCache's where both systems have the key, and as in LMCache a size is a number of GiB for one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvstore.config.lmcache import OTHER_CODECS, OTHER_SCHEMES
from kvstore.config.places import ListedPlace
from kvstore.errors import ConfigError
from kvstore.format.codecs import CODEC_NAMES
from kvstore.policies import POLICIES, choose_policy
from kvstore.protocol.loopback import is_loopback
from kvstore.tiers import known_schemes, tier_behind

GIB_BYTES: Final = 2**30
HIDDEN: Final = "***"
_MAX_SIZE_GIB: Final = 1_000_000
_MAX_TIMEOUT_S: Final = 86_400
_END_PORT: Final = 65_536
PD_ROLES: Final = {"sender": "kv_producer", "receiver": "kv_consumer", "both": "kv_both"}
"""What vLLM's ``kv_role`` is where LMCache's ``pd_role`` is such."""
_MAX_PIN_S: Final = 365 * 86_400
_NAIVE: Final = "naive"  # LMCache's word for none
REQUEST_FIELDS: Final = ("skip_save", "skip_load", "ttl", "tag", "pin")
"""What a client may ask for one request, where the operator lets it count."""
_SAFE_FIELDS: Final = ("skip_save", "skip_load", "ttl", "tag")  # of the request's own KV; a pin takes others' room


@dataclass(frozen=True)
class Unit:
    """What one of a number is, as messages and the documentation call it."""

    name: str


class StoreConfig(BaseModel):
    """Everything a user may set. Immutable; ``load_config`` is the usual way to get one.

    Built directly it raises ``pydantic.ValidationError``; ``load_config`` turns that into a ``ConfigError`` which says
    where the value came from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    chunk_size: Annotated[int, Unit("tokens")] = Field(
        default=256,
        gt=0,
        description="Length of a chunk, which is stored and found as one piece. A multiple of vLLM's block size.",
    )
    local_cpu: bool = Field(
        default=True,
        description="Keep chunks in CPU memory. If false, it only stages what goes to and comes from slower tiers.",
    )
    max_local_cpu_size: Annotated[float, Unit("GiB per worker")] = Field(
        default=5.0,
        gt=0,
        le=_MAX_SIZE_GIB,
        description="CPU memory that each worker (GPU) reserves at start, for the CPU tier and for staging.",
    )
    max_local_gpu_size: Annotated[float, Unit("GiB per worker")] = Field(
        default=0.0,
        ge=0,
        le=_MAX_SIZE_GIB,
        description="GPU memory for the chunks loaded most often (see [gpu-tier.md](gpu-tier.md) for when it pays). "
        "vLLM must leave it free: lower `--gpu-memory-utilization`. 0 for none.",
    )
    local_disk: str | tuple[str, ...] | None = Field(
        default=None,
        description="Folder for chunks on disk: a path or a `file://` URI; `~` is expanded, and a relative path starts "
        "at the working directory. Several disks are used at once if a list names a folder on each (in a file or in "
        "vLLM's extra config). One folder belongs to one engine. Without it nothing is kept on disk.",
    )
    max_local_disk_size: Annotated[float, Unit("GiB per worker")] = Field(
        default=0.0,
        ge=0,
        le=_MAX_SIZE_GIB,
        validate_default=True,
        description="Disk space that each worker may fill, in equal parts if there are several folders. Must be set "
        "together with `local_disk`.",
    )
    cache_policy: str = Field(
        default="ADAPTIVE",
        description="Which chunks go first when memory or disk is full, and which are worth storing: `ADAPTIVE`, "
        "`LRU`, `LFU`, `ARC` or `S3FIFO` (see [policies.md](policies.md)). LMCache's `FIFO` and `MRU` are "
        "replaced, with a warning.",
    )
    disk_cache_policy: str | None = Field(
        default=None,
        description="The same for the disk alone. If null, as `cache_policy` says.",
    )
    record_trace: str | None = Field(
        default=None,
        min_length=1,
        description="File that notes, in hashes, which chunks each request used, for `kvstore simulate`; `.1`, "
        "`.2`, ... is appended if it exists.",
    )
    save_decode_cache: bool = Field(
        default=False,
        description="Store the KV of generated tokens too, not only that of prompts.",
    )
    save_unfull_chunk: bool = Field(
        default=True,
        description="Store the end of a prompt that does not fill a chunk, up to its last whole block.",
    )
    discard_partial_chunks: bool = Field(
        default=False,
        description="LMCache's other name for `save_unfull_chunk: false`: if either says so, only whole chunks are "
        "stored. Also read without a prefix in vLLM's extra config.",
    )
    skip_last_n_tokens: Annotated[int, Unit("tokens")] = Field(
        default=0,
        ge=0,
        description="So many tokens at the end of a sequence are neither stored nor loaded, such as the end of a chat "
        "template, which the next turn replaces. Also read without a prefix in vLLM's extra config.",
    )
    priority_limit: int | None = Field(
        default=None,
        description="Requests whose vLLM priority is a larger number than this, so less urgent, are not stored, only "
        "loaded. If null, requests of every priority are stored.",
    )
    force_skip_save: bool = Field(
        default=False,
        description="Store nothing; what is stored already is still loaded. Meant for the variable "
        "`KVSTORE_FORCE_SKIP_SAVE`, which may also be 1 or 0.",
    )
    request_fields: tuple[str, ...] = Field(
        default=_SAFE_FIELDS,
        description="Which fields of requests count (see [per-request.md](per-request.md)), of `skip_save`, "
        "`skip_load`, `ttl`, `tag` and `pin`; a list, or text with commas. The others are ignored, with a warning. "
        "With `pin` any client may keep up to half of the pool.",
    )
    pin_max_secs: Annotated[float, Unit("seconds")] = Field(
        default=86_400.0,
        gt=0,
        le=_MAX_PIN_S,
        description="How long a pin that a request asked for lasts, unless it is renewed.",
    )
    min_retrieve_tokens: Annotated[int, Unit("tokens")] = Field(
        default=0,
        ge=0,
        description="A hit shorter than this is computed instead of loaded. 0 loads every hit.",
    )
    max_tokens_per_load: Annotated[int, Unit("tokens")] = Field(
        default=0,
        ge=0,
        description="A longer hit is cut to so many tokens, in whole blocks, and the rest is computed. 0 for no limit.",
    )
    enable_async_loading: bool | None = Field(
        default=None,
        description="Whether a request waits for its load while others go on computing. If null or `auto`, chosen for "
        "each load: yes from disk or a remote tier, and for a long one from memory if others are running; otherwise "
        "the step waits. If false, a slower tier needs vLLM's `--no-async-scheduling`. Always yes where several "
        "workers send what they compute to a remote tier or another engine.",
    )
    enable_async_saving: bool | None = Field(
        default=None,
        description="Whether what a step has computed is copied to memory while the next step runs, and vLLM keeps the "
        "blocks until then; otherwise the step waits for the copy. If null or `auto`: yes on a GPU, no on a CPU.",
    )
    use_layerwise: bool = Field(
        default=False,
        description="What a step waits for is loaded, and stored, layer by layer with the model. vLLM then captures "
        "piecewise CUDA graphs only. Not used with speculative decoding.",
    )
    load_only_if_faster: bool = Field(
        default=True,
        description="Compute a hit that would take longer to load, as measured while running.",
    )
    verify_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Part of the hits that are computed all the same, to compare what is stored with it (see "
        "[operations.md](operations.md#verifying)). 0 for none.",
    )
    blocking_timeout_secs: Annotated[float, Unit("seconds")] = Field(
        default=10.0,
        gt=0,
        le=_MAX_TIMEOUT_S,
        description="The longest that a read from a slower tier or a flush may make its caller wait; a close flushes, "
        "and may then take as long again.",
    )
    disk_io_threads: Annotated[int, Unit("threads")] = Field(
        default=4,
        ge=1,
        le=64,
        description="Threads that read and write chunks on disk. Also read from `extra_config`.",
    )
    local_disk_serde: str = Field(
        default="none",
        description="What chunks on disk are encoded with: `none`, `lz4`, `split` (lossless, bf16 a third smaller) or "
        "`int8` (lossy); see [codecs.md](codecs.md).",
    )
    use_odirect: bool | None = Field(
        default=None,
        description="Pass by the page cache (O_DIRECT). If null, where the folder supports it. Also read from "
        "`extra_config`.",
    )
    max_write_queue: Annotated[int | None, Unit("chunks")] = Field(
        default=None,
        ge=1,
        description="How many chunks may wait to be written to disk; beyond that a chunk is counted and not written. "
        "If null, half of what fits in `max_local_cpu_size`.",
    )
    remote_url: str | None = Field(
        default=None,
        description="A tier that several engines share: a cache server, `kvs+ipc://` or `kvs://` (see [server.md]"
        "(server.md)), or Redis, `redis://`, `rediss://`, `unix://`, `redis-sentinel://` or `redis-cluster://` (see "
        "[redis.md](redis.md)); or, read-only, a pack: `pack:///path` (see [warming.md](warming.md#a-pack-as-a-tier)). "
        "A package that brings a tier brings its scheme, too (see [tiers.md](tiers.md)). Without it nothing is shared.",
    )
    remote_username: str | None = Field(
        default=None,
        min_length=1,
        description="User to log in with at the remote tier, if not in its URL.",
    )
    remote_password: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="Password of that user. Best given as the variable `KVSTORE_REMOTE_PASSWORD`.",
    )
    remote_key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of this engine's secret key, for a cache server on another host. `kvstore keygen` makes it.",
    )
    remote_server_key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of that server's public key.",
    )
    remote_required: bool = Field(
        default=False,
        description="Refuse to start if the remote tier cannot be used. If false, a warning says why, and it is tried "
        "again later.",
    )
    remote_ttl_secs: Annotated[int | None, Unit("seconds")] = Field(
        default=None,
        ge=1,
        description="How long a chunk stays at the remote tier once stored. If null, until that tier evicts it.",
    )
    remote_serde: str = Field(
        default="none",
        description="What chunks at the remote tier are encoded with: `none` (LMCache calls it `naive`), `lz4`, "
        "`split` (lossless, bf16 a third smaller) or `int8` (lossy); see [codecs.md](codecs.md). Engines that share "
        "chunks need the same. LMCache's `cachegen` and `kivi` are replaced by `none`, with a warning.",
    )
    remote_connections: Annotated[int, Unit("connections")] = Field(
        default=8,
        ge=1,
        le=1024,
        description="Connections of each worker to each server of the remote tier.",
    )
    remote_io_threads: Annotated[int, Unit("threads")] = Field(
        default=4,
        ge=1,
        le=64,
        description="Threads that read chunks from the remote tier.",
    )
    remote_lookup_cache_secs: Annotated[float, Unit("seconds")] = Field(
        default=3.0,
        ge=0,
        le=_MAX_TIMEOUT_S,
        description="How long an answer of the remote tier counts about what it holds. 0: for the request that asked.",
    )
    max_remote_queue: Annotated[int | None, Unit("chunks")] = Field(
        default=None,
        ge=1,
        description="How many chunks may wait to be sent to the remote tier; beyond that a chunk is counted and not "
        "sent. If null, a quarter of what fits in `max_local_cpu_size`.",
    )
    lookup_timeout_ms: Annotated[int, Unit("milliseconds")] = Field(
        default=500,
        ge=1,
        le=60_000,
        description="How long a request may wait to learn what the remote tier holds; then it is computed, and nothing "
        "is concluded for others.",
    )
    required: bool = Field(
        default=True,
        description="Stop vLLM if memory, folder or another tier cannot be had at start. If false, vLLM then runs "
        "without the cache, and a warning says why. A key or flag that is wrong stops it always.",
    )
    internal_api_server_enabled: bool = Field(
        default=False,
        description="Answer an administrator over HTTP, in the scheduler's process (see [operations.md]"
        "(operations.md#the-admin-endpoint)). Needs the extra `admin`, whose packages vLLM brings along.",
    )
    internal_api_server_host: str = Field(
        default="127.0.0.1",
        validate_default=True,
        description="Loopback address to listen on: there are no passwords, so others are refused.",
    )
    internal_api_server_port_start: int = Field(
        default=6999,
        ge=0,
        le=65_000,
        description="Port to listen on; a data-parallel replica adds its rank. 0 for any that is free, which the log "
        "names.",
    )
    server_listen: str | None = Field(
        default=None,
        min_length=1,
        description="Where `kvstore serve` listens: `kvs+ipc:///folder` for this host, `kvs://host:port` for others, "
        "or both with a comma between them (see [server.md](server.md)). Engines do not look at keys that begin with "
        "`server_`.",
    )
    server_key_file: str | None = Field(
        default=None,
        min_length=1,
        description="File of the server's secret key. Needed to listen on an address that other hosts can reach.",
    )
    server_clients: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of the public keys of those who may come in from other hosts.",
    )
    server_operators: str | None = Field(
        default=None,
        min_length=1,
        description="Which of `server_clients` may also clear, pin and explain from another host: names with commas "
        "between them, or `*` for whoever can connect. If null, only the server's own user, over `kvs+ipc://`.",
    )
    server_quotas: str | None = Field(
        default=None,
        min_length=1,
        description="How many GiB a namespace may hold at the server, by model or by id: `my-model=40, *=10`. If null, "
        "as much as there is.",
    )
    server_http_port: int | None = Field(
        default=None,
        ge=0,
        le=65_535,
        description="Loopback port for `/metrics` and `/healthz` of the server; 0 for any that is free. If null, none.",
    )
    server_drain_secs: Annotated[float, Unit("seconds")] = Field(
        default=30.0,
        ge=0,
        le=_MAX_TIMEOUT_S,
        description="How long writes to disk may take when the server is told to end.",
    )
    enable_pd: bool = Field(
        default=False,
        description="Hand KV over between prefill and decode engines (see [disaggregation.md](disaggregation.md)).",
    )
    pd_role: str | None = Field(
        default=None,
        description="LMCache's `sender`, `receiver` or `both`. A `sender` does not listen, unless `pd_bidirectional` "
        "is set. Who stores and who loads vLLM's `kv_role` decides; a warning tells if they differ.",
    )
    pd_bidirectional: bool = Field(
        default=False,
        description="A prefill engine also takes from the decode engine what that holds of the next turn, if that is "
        "in `pd_allowed_hosts` with its port, or in `peers`.",
    )
    pd_buffer_size: Annotated[int, Unit("bytes per worker")] = Field(
        default=GIB_BYTES,
        gt=0,
        description="Memory of the server that each worker opens at `pd_peer_init_port`.",
    )
    pd_peer_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address at which this engine's workers listen, and by which others reach them.",
    )
    pd_peer_init_port: int | tuple[int, ...] | None = Field(
        default=None,
        description="Port at which the first worker of this engine listens, so that others can send to it and read "
        "from it; worker number n adds n, or a list has a port for each. Needs `enable_pd`, and takes the place of "
        "`remote_url`. If null, it does not listen.",
    )
    pd_allowed_hosts: tuple[str, ...] | None = Field(
        default=None,
        description="Hosts to which requests may have KV sent; a list, or text with commas. If null, loopback, "
        "`pd_peer_host` and the hosts in `peers`. An entry `host:port` is also an engine that a request may name as "
        "one that has its KV, with `pd_bidirectional`: it is then read for that request.",
    )
    pd_timeout_ms: Annotated[int, Unit("milliseconds")] = Field(
        default=10_000,
        ge=1,
        le=_MAX_TIMEOUT_S * 1000,
        description="How long a request waits for KV that is on its way to this engine; then it is computed.",
    )
    peers: tuple[str, ...] = Field(
        default=(),
        description="Other engines whose KV is read: `kvs://host:port` of their first worker, a list or text with "
        "commas. Nothing is sent to them.",
    )
    min_remote_tokens: Annotated[int, Unit("tokens")] = Field(
        default=0,
        ge=0,
        description="What the remote tier or peers would add to a hit is computed if it is shorter than this.",
    )
    model_id: str | None = Field(
        default=None,
        min_length=1,
        description="Identity of the weights, in place of the one derived from the model's files. Required with vLLM's "
        "`load_format=dummy`. KV is shared between engines that have the same.",
    )

    @property
    def max_local_cpu_bytes(self) -> int:
        """``max_local_cpu_size`` in bytes."""
        return int(self.max_local_cpu_size * GIB_BYTES)

    @property
    def max_local_gpu_bytes(self) -> int:
        """``max_local_gpu_size`` in bytes."""
        return int(self.max_local_gpu_size * GIB_BYTES)

    @property
    def max_local_disk_bytes(self) -> int:
        """``max_local_disk_size`` in bytes."""
        return int(self.max_local_disk_size * GIB_BYTES)

    @property
    def saves_tails(self) -> bool:
        """Whether the end of a prompt that does not fill a chunk is stored."""
        return self.save_unfull_chunk and not self.discard_partial_chunks

    @cached_property  # the registry looks through all packages that are installed
    def shared_url(self) -> str | None:
        """``remote_url``, if it leads to a tier that there is."""
        return self.remote_url if _leads_here(self.remote_url) else None

    @property
    def listens(self) -> bool:
        """Whether workers open a server of their own, for others to send to and read from."""
        return self.pd_peer_init_port is not None and _takes(self.enable_pd, self.pd_role, self.pd_bidirectional)

    @property
    def host_memory_bytes(self) -> int:
        """What each worker reserves in host memory."""
        return self.max_local_cpu_bytes + (self.pd_buffer_size if self.listens else 0)

    @property
    def goes_both_ways(self) -> bool:
        """Whether producers load, too, and consumers save."""
        return self.enable_pd and self.pd_bidirectional

    @property
    def has_remote(self) -> bool:
        """Whether chunks may come from other engines: from a tier that is shared, from peers, or sent by them."""
        return self.shared_url is not None or self.enable_pd or bool(self.peers)

    @property
    def allowed_hosts(self) -> frozenset[str]:
        """The hosts to which requests may have KV sent, in lower case; ``allows_host`` asks it."""
        if self.pd_allowed_hosts is not None:
            return frozenset(ListedPlace.parse(text).host for text in self.pd_allowed_hosts)
        named = (urlsplit(url).hostname or "" for url in self.peers)
        return frozenset({self.pd_peer_host.lower(), *named})

    def allows_host(self, host: str) -> bool:
        """Whether a request may have KV sent to a host."""
        is_listed = host.lower() in self.allowed_hosts
        return is_listed or (self.pd_allowed_hosts is None and is_loopback(host))

    @property
    def sources(self) -> frozenset[ListedPlace]:
        """The engines that a request may name as one that has its KV, each with its port. No host is one by itself."""
        if not self.goes_both_ways:
            return frozenset()
        listed = map(ListedPlace.parse, self.pd_allowed_hosts or ())
        peers = (ListedPlace(parts.hostname or "", parts.port) for parts in map(urlsplit, self.peers))
        return frozenset(place for place in (*listed, *peers) if place.port is not None)

    @property
    def remote_codec(self) -> str:
        """The codec that ``remote_serde`` leads to."""
        return self.remote_serde if self.remote_serde in CODEC_NAMES else "none"

    @property
    def local_disk_folders(self) -> tuple[str, ...]:
        """``local_disk`` as absolute paths; empty without a disk tier."""
        if self.local_disk is None:
            return ()
        return (self.local_disk,) if isinstance(self.local_disk, str) else self.local_disk

    def shown(self) -> dict[str, object]:
        """All values for people to see, without passwords."""
        values = self.model_dump(mode="json")
        if self.remote_password is not None:
            values["remote_password"] = HIDDEN
        if self.remote_url is not None:
            values["remote_url"] = _hide_login(self.remote_url)
        values["peers"] = [_hide_login(url) for url in self.peers]
        return values

    @field_validator("enable_async_loading", "enable_async_saving", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return None if value == "auto" else value

    @field_validator("local_disk", mode="before")
    @classmethod
    def _make_absolute(cls, value: object) -> str | tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            return _absolute_folder(value)
        folders = tuple(_absolute_folder(item) for item in value)
        if not folders:
            raise PydanticCustomError("folder", "must name a folder; leave the key out for no disk tier")
        if len(set(folders)) < len(folders):
            raise PydanticCustomError("folder", "must not name a folder twice")
        return folders if len(folders) > 1 else folders[0]

    @field_validator("force_skip_save", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        return bool(value) if value in (0, 1) else value

    @field_validator("remote_url")
    @classmethod
    def _known_scheme(cls, value: str | None) -> str | None:
        if not value:
            return None
        try:
            tier_behind(value)
        except ConfigError as error:
            scheme, mark, _ = value.partition("://")
            known = known_schemes()
            if mark and scheme in known:
                raise PydanticCustomError("remote_url", "cannot be used: {problem}", {"problem": str(error)}) from error
            if not mark or scheme not in OTHER_SCHEMES:
                names = ", ".join(f"{name}://" for name in known)
                raise PydanticCustomError("remote_url", "must begin with one of {known}", {"known": names}) from error
        return value

    @field_validator("request_fields", "peers", "pd_allowed_hosts", mode="before")
    @classmethod
    def _several(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(value) if isinstance(value, list) else value

    @field_validator("pd_allowed_hosts")
    @classmethod
    def _known_places(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        try:
            for text in value or ():
                ListedPlace.parse(text)
        except ValueError as error:
            raise PydanticCustomError("places", "must name hosts, or hosts with a port: 10.0.0.5:7300") from error
        return value

    @field_validator("peers")
    @classmethod
    def _known_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            try:
                parts = urlsplit(url)
                is_known = parts.scheme == "kvs" and parts.hostname and parts.port and not parts.path
            except ValueError:
                is_known = False
            if not is_known:
                raise PydanticCustomError("peers", "must name engines by host and port: kvs://10.0.0.5:7300")
        return value

    @field_validator("pd_role")
    @classmethod
    def _known_role(cls, value: str | None) -> str | None:
        if value not in {None, *PD_ROLES}:
            raise PydanticCustomError("role", "must be one of {known}", {"known": ", ".join(PD_ROLES)})
        return value

    @field_validator("pd_peer_init_port", mode="before")
    @classmethod
    def _ports(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("pd_peer_init_port")
    @classmethod
    def _may_listen(cls, value: int | tuple[int, ...] | None, info: ValidationInfo) -> int | tuple[int, ...] | None:
        ports = () if value is None else (value,) if isinstance(value, int) else value
        if value is not None and (not ports or not all(0 < port < _END_PORT for port in ports)):
            raise PydanticCustomError("port", "must be a port, or a list with a port for each worker")
        given = info.data
        if not ports or not _takes(given.get("enable_pd"), given.get("pd_role"), given.get("pd_bidirectional")):
            return value
        if _leads_here(info.data.get("remote_url")):
            message = "cannot be set together with remote_url: chunks go to this engine's own server; leave one out"
            raise PydanticCustomError("port", message)
        host = info.data.get("pd_peer_host", "127.0.0.1")
        has_keys = info.data.get("server_key_file") and info.data.get("server_clients")
        if not is_loopback(host) and not has_keys:
            message = (
                "other hosts can reach pd_peer_host {host}, so it needs server_key_file and server_clients: make keys "
                "with kvstore keygen, or set pd_peer_host to 127.0.0.1"
            )
            raise PydanticCustomError("port", message, {"host": host})
        return value

    @field_validator("request_fields")
    @classmethod
    def _known_fields(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not set(value) <= set(REQUEST_FIELDS):
            raise PydanticCustomError("fields", "must be some of {known}", {"known": ", ".join(REQUEST_FIELDS)})
        return value

    @field_validator("local_disk_serde")
    @classmethod
    def _known_codec(cls, value: str) -> str:
        if value not in CODEC_NAMES:
            raise PydanticCustomError("codec", "must be one of {known}", {"known": ", ".join(CODEC_NAMES)})
        return value

    @field_validator("remote_serde", mode="before")
    @classmethod
    def _no_serde(cls, value: object) -> object:
        return "none" if value is None or value == "" else value

    @field_validator("remote_serde")
    @classmethod
    def _known_serde(cls, value: str) -> str:
        if value not in {_NAIVE, *CODEC_NAMES, *OTHER_CODECS}:
            raise PydanticCustomError("codec", "must be one of {known}", {"known": ", ".join(CODEC_NAMES)})
        return value

    @field_validator("internal_api_server_host")
    @classmethod
    def _loopback_only(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("internal_api_server_enabled") and not is_loopback(value):
            message = "must be a loopback address such as 127.0.0.1: there are no passwords"
            raise PydanticCustomError("loopback", message, {"because_of": "internal_api_server_enabled"})
        return value

    @field_validator("cache_policy", "disk_cache_policy")
    @classmethod
    def _known_policy(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                choose_policy(value)
            except ConfigError as error:
                raise PydanticCustomError("policy", "must be one of {known}", {"known": ", ".join(POLICIES)}) from error
        return value

    @field_validator("max_local_disk_size")
    @classmethod
    def _need_size_with_folder(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("local_disk") is not None:
            message = "must be greater than 0 because local_disk is set: say how many GiB of disk each worker may fill"
            raise PydanticCustomError("size_with_folder", message, {"because_of": "local_disk"})
        return value


def _leads_here(url: str | None) -> bool:
    """Whether a remote URL leads to a tier that there is; those of LMCache's may not."""
    try:
        return url is not None and bool(tier_behind(url))
    except ConfigError:
        return False


def _takes(enable_pd: object, pd_role: object, pd_bidirectional: object) -> bool:
    """Whether an engine takes KV from others. A sender does not: LMCache's files name the receiver's port there."""
    return bool(enable_pd) and (pd_role != "sender" or bool(pd_bidirectional))


def _absolute_folder(text: object) -> str:
    """A path or ``file://`` URI as an absolute path; it need not exist.

    Raises:
        PydanticCustomError: the value names no local folder.
    """
    if isinstance(text, bool):
        raise PydanticCustomError("folder", "must be a folder, not true or false; leave the key out for no disk tier")
    if not isinstance(text, str):
        raise PydanticCustomError("string_type", "must be text")
    if "," in text:
        raise PydanticCustomError(
            "folder", "must have no comma in its name; several folders are written as a list: [/disk1, /disk2]"
        )
    path = _path_of_uri(text) if "://" in text else text
    if not path or "\0" in path:
        raise PydanticCustomError("folder", "must be the path of a folder; leave the key out for no disk tier")
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise PydanticCustomError("folder", "must name an existing user after ~, or be an absolute path") from error


def _path_of_uri(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    if scheme.lower() != "file":
        raise PydanticCustomError("folder", "must be a path or a file:// URI: other addresses are no folder")
    if not rest.startswith(("/", "localhost/")):
        # LMCache reads file://folder/ as a relative path, the standard as a host's name: refuse to guess.
        raise PydanticCustomError("folder", "must have three slashes and an absolute path: file:///var/cache/kvstore")
    return unquote(urlsplit("file://" + rest).path)


def _hide_login(url: str) -> str:
    """A URL without what stands before its ``@``, and without the values in its query."""
    scheme, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")  # first, whatever else stands in a password
    place, mark, query = place.partition("?")
    options = "&".join(f"{option.partition('=')[0]}={HIDDEN}" for option in query.split("&"))
    return f"{scheme}://{HIDDEN if login else ''}{at}{place}{mark}{options if mark else ''}"
