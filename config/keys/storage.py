"""Keys of the tiers that belong to one engine: CPU memory, GPU memory, disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvstore.config.keys.base import GIB_BYTES, Codec, Gib, Keys, QueueLength, Text, Threads, Unit, check_policy
from kvstore.model.errors import ConfigError
from kvstore.model.quotas import BY_SALT, QuotaRules


def _as_folders(value: object) -> str | tuple[str, ...] | None:
    """Return one absolute path, or several."""
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


def _check_if_given(policy: str | None) -> str | None:
    return None if policy is None else check_policy(policy)


def _check_quotas(by: str, memory: str | None = None, disk: str | None = None) -> str:
    """Return ``quota_by`` if it and the quotas can be used.

    Raises:
        PydanticCustomError: they cannot.
    """
    try:
        QuotaRules.parse(by, memory, disk)
    except ConfigError as error:
        raise PydanticCustomError("quotas", "cannot be used: {problem}", {"problem": str(error)}) from error
    return by


class StorageKeys(Keys):
    """Chunks, and an engine's own tiers for them."""

    chunk_size: Annotated[int, Unit("tokens"), Field(gt=0)] = 256
    """Tokens stored as one piece; a hit may end inside, with a block. Rounded up to whole blocks of vLLM's, of every KV
    cache group."""
    checkpoint_interval: Annotated[int, Unit("tokens"), Field(ge=0)] = 0
    """Of models with windows or states ([models.md](models.md)): how often a checkpoint is stored within a prompt. One
    is always stored where a prompt ends or another parted from it, and wherever it is no larger than a chunk. 0 for no
    more than that."""
    local_cpu: bool = True
    """Keep chunks in CPU memory. If false, it only stages what moves to and from slower tiers."""
    max_local_cpu_size: Gib = Field(default=5.0, gt=0)
    """CPU memory that each worker reserves at start, also for staging."""
    max_local_gpu_size: Gib = Field(default=0.0, ge=0)
    """GPU memory for the chunks loaded most often ([gpu-tier.md](gpu-tier.md)). vLLM must leave it free: lower
    `--gpu-memory-utilization`."""
    pin_in_background: bool = False
    """On a GPU, pin memory while vLLM starts and serves, not before, which takes up to 0.2 s a GiB
    ([gpu.md](gpu.md#pinned-memory)). Copies are slower until then."""
    local_disk: Annotated[str | tuple[str, ...] | None, BeforeValidator(_as_folders)] = None
    """Folder for chunks: a path or a `file://` URI, or a list with one folder on each of several disks (in a file or in
    vLLM's extra config). `~` is expanded; a relative path starts at the working directory. A folder belongs to one
    engine."""
    max_local_disk_size: Gib = Field(default=0.0, ge=0, validate_default=True)
    """Disk space of each worker, divided equally among folders. Set it together with `local_disk`."""
    disk_io_threads: Threads = 4
    """Threads that read and write. Also read from `extra_config`."""
    local_disk_serde: Codec = "none"
    """Codec on disk: `none`, `lz4`, `split` (lossless, bf16 a third smaller) or `int8` (lossy)
    ([codecs.md](codecs.md))."""
    encryption_keys: Text = None
    """File with the keys that encrypt chunks on disk, in a shared folder and in an object store
    ([encryption.md](encryption.md)). Redis and memory hold them as they are."""
    use_odirect: bool | None = None
    """Bypass the page cache (O_DIRECT). If null, wherever the folder supports it. Also read from `extra_config`."""
    max_write_queue: QueueLength = None
    """Chunks that may wait to be written; beyond that they are counted and not written. If null, half of what fits in
    `max_local_cpu_size`."""
    cache_policy: Annotated[str, AfterValidator(check_policy)] = "ADAPTIVE"
    """Policy of eviction and admission, in memory and on disk: `ADAPTIVE`, `LRU`, `LFU`, `ARC` or `S3FIFO`
    ([policies.md](policies.md))."""
    disk_cache_policy: Annotated[str | None, AfterValidator(_check_if_given)] = None
    """Policy on disk, if it differs. If null, `cache_policy`."""
    quota_by: Annotated[str, AfterValidator(_check_quotas)] = BY_SALT
    """Names in these quotas, and for those of a cache server: `salt`, or `tag:team` for values of the tag `team`."""
    local_cpu_quotas: Text = None
    """GiB of memory by name: `red=4, *=1` ([per-request.md](per-request.md#quotas))."""
    local_disk_quotas: Text = None
    """The same on disk."""
    record_trace: Text = None
    """File that records, as hashes, which chunks requests used, and why they missed others, for `kvstore simulate` and
    `kvstore why`. If it exists, `.1`, `.2`, ... is appended."""

    @property
    def quotas(self) -> QuotaRules:
        """``local_cpu_quotas`` and ``local_disk_quotas``."""
        return QuotaRules.parse(self.quota_by, self.local_cpu_quotas, self.local_disk_quotas)

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
    def local_disk_folders(self) -> tuple[str, ...]:
        """``local_disk`` as absolute paths; empty without a disk tier."""
        if self.local_disk is None:
            return ()
        return (self.local_disk,) if isinstance(self.local_disk, str) else self.local_disk

    @field_validator("max_local_disk_size")
    @classmethod
    def _need_size_with_folder(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("local_disk") is not None:
            message = "must be greater than 0 because local_disk is set: say how many GiB of disk each worker may fill"
            raise PydanticCustomError("size_with_folder", message, {"because_of": "local_disk"})
        return value

    @field_validator("local_cpu_quotas")
    @classmethod
    def _usable_in_memory(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not info.data.get("local_cpu", True):
            raise PydanticCustomError("quotas", "needs local_cpu: without it, memory keeps no chunks")
        _check_quotas(info.data.get("quota_by", BY_SALT), memory=value)
        return value

    @field_validator("local_disk_quotas")
    @classmethod
    def _usable_on_disk(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("local_disk") is None:
            raise PydanticCustomError("quotas", "needs local_disk: without it, there is nothing to divide")
        _check_quotas(info.data.get("quota_by", BY_SALT), info.data.get("local_cpu_quotas"), value)
        return value


def _absolute_folder(text: object) -> str:
    """Return a path or ``file://`` URI as an absolute path; it need not exist.

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
        # LMCache reads file://folder/ as a relative path, the standard as a host name, so it is refused.
        raise PydanticCustomError("folder", "must have three slashes and an absolute path: file:///var/cache/kvstore")
    return unquote(urlsplit("file://" + rest).path)
