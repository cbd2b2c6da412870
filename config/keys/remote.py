"""Keys of the tier that several engines share."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvstore.config.keys.base import Keys, QueueLength, Seconds, Text, Threads, Unit, require_one_of
from kvstore.config.lmcache import OTHER_CODECS, OTHER_SCHEMES
from kvstore.format.codecs import CODEC_NAMES
from kvstore.model.errors import ConfigError
from kvstore.tiers import known_schemes, leads_to, tier_behind

HOST_MARK: Final = "{host}"
"""Stands for the host's own address."""
_NAIVE: Final = "naive"  # LMCache's word for none


def _read_naught(value: object) -> object:
    return "none" if value is None or value == "" else value


class RemoteKeys(Keys):
    """The shared tier: its address, login and limits."""

    remote_url: str | None = None
    """Tier that several engines share. A [cache server](server.md) is `kvs+ipc://`, `kvs://`, `kvs+srv://`, `kvs+dns://`
    or `kvs+file://`, [Redis](redis.md) `redis://`, `rediss://`, `unix://`, `redis-sentinel://` or `redis-cluster://`,
    [Mooncake](mooncake.md) `mooncake://`, an [object store](object.md) `s3://`, `az://` or `gs://`, a
    [shared folder](object.md) `file:///path`, a read-only [pack](warming.md#a-pack-as-a-tier) `pack:///path`. Other
    schemes are those of [other packages](tiers.md)."""
    remote_host_url: str | None = None
    """Address of this host's own `remote_url` for [other hosts](parallelism.md#several-hosts) of the engine:
    `kvs://{host}:5566`. `{host}` is vLLM's address of its host."""
    remote_username: Text = None
    """User name there, unless the URL has one."""
    remote_password: Text = Field(default=None, repr=False)
    """Password of that user. Best set as the variable `KVSTORE_REMOTE_PASSWORD`."""
    remote_key_file: Text = None
    """File with this engine's secret key, for a cache server on another host. `kvstore keygen` makes it."""
    remote_server_key_file: Text = None
    """File with that server's public key."""
    remote_required: bool = False
    """Refuse to start if the remote tier cannot be used. If false, a warning says why, and it is tried again later."""
    remote_ttl_secs: Annotated[int | None, Unit("seconds"), Field(ge=1)] = None
    """Time after which a stored chunk is removed there. If null, it stays until that tier evicts it."""
    remote_serde: Annotated[str, BeforeValidator(_read_naught)] = "none"
    """Codec there, as for `local_disk_serde`; `naive` is `none`. Engines that share chunks need the same one."""
    remote_connections: Annotated[int, Unit("connections"), Field(ge=1, le=1024)] = 8
    """Connections from each worker to each server."""
    remote_io_threads: Threads = 4
    """Threads that read from there."""
    remote_lookup_cache_secs: Seconds = Field(default=3.0, ge=0)
    """Time for which an answer about its contents is reused. 0: only for the request that asked."""
    max_remote_queue: QueueLength = None
    """Chunks that may wait to be sent; one that finds the queue full is counted and not sent. If null, a quarter of
    what fits in `max_local_cpu_size`."""
    lookup_timeout_ms: Annotated[int, Unit("milliseconds"), Field(ge=1, le=60_000)] = 500
    """Longest wait of a request to learn what is there. After that it is computed, and nothing is concluded for other
    requests."""

    @cached_property  # the registry searches all installed packages
    def shared_url(self) -> str | None:
        """``remote_url`` if there is a tier for it, else None."""
        return self.remote_url if has_tier(self.remote_url) else None

    @property
    def remote_codec(self) -> str:
        """The codec selected by ``remote_serde``."""
        return self.remote_serde if self.remote_serde in CODEC_NAMES else "none"

    @property
    def encrypts_remote(self) -> bool:
        """True if the tier of ``remote_url`` keeps chunks as ``encryption_keys`` says."""
        return any(leads_to(self.shared_url, name) for name in ("mooncake", "object", "pack"))

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

    @field_validator("remote_host_url")
    @classmethod
    def _same_tier(cls, value: str | None, info: ValidationInfo) -> str | None:
        url = info.data.get("remote_url")
        if not value or url is None or not has_tier(url):
            return None
        if not leads_to(value, tier_behind(url)):
            raise PydanticCustomError("remote_url", "must lead to a tier of the same kind as remote_url")
        return value

    @field_validator("remote_serde")
    @classmethod
    def _known_serde(cls, value: str) -> str:
        return value if value in {_NAIVE, *OTHER_CODECS} else require_one_of(value, CODEC_NAMES)


def has_tier(url: str | None) -> bool:
    """Tell if there is a tier for a URL; some of LMCache's have none."""
    try:
        return url is not None and bool(tier_behind(url))
    except ConfigError:
        return False
