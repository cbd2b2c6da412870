"""Parts of a `FakeVllm` and a `FakeGroups`: their setups, requests and steps, and a listener to events."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.adapters.vllm.plan import StepPlan, StepReport
from kvstore.adapters.vllm.requests.rows import RowMap
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.telemetry.announcer import ANNOUNCED, Adapter, Removed, Stored
from kvstore.engine.options import RemoteOptions
from kvstore.index.plans import Place
from kvstore.model.groups import Group, GroupKind, Groups
from support.remote import REMOTE, FakeServer

BLOCK = 4
CHUNK = 16
LAYERS = 2
ONE_GROUP = RowMap(Groups((Group(GroupKind.FULL, BLOCK, block_bytes=64),)))
CHUNK_SLOT_BYTES = 4096
CHUNK_FILE_BYTES = 8192
GARBAGE = 0x6B6B6B6B
SERVER_BYTES = 8 << 20
VOCABULARY = 50


def kv_of(seed: str, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the KV of every token; ``seed`` stands for all that decides it besides the tokens."""
    value = zlib.crc32(seed.encode())
    values = []
    for token in tokens:
        value = (value * 6364136223846793005 + token * 2 + 1442695040888963407) % (1 << 62)
        values.append(value)
    return np.array(values, np.int64)


def sample(tokens: Sequence[int]) -> int:
    """Return the token that the model samples next."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


@dataclass(eq=False)
class FakeRequest:
    """Request that satisfies `RequestView`."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 1
    salt: str = ""
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    priority: int = 0
    placeholders: int = 0
    state: str = "waiting"  # running, preempted, loading, finished
    loaded: bool = False  # the fetch it waited for is over
    tables: list[list[int]] = field(default_factory=list)  # its blocks of each group
    offered: list[int] = field(default_factory=list)  # states of each group that connectors have been told of
    local: int = 0  # tokens that it shares with others
    hit: int = 0  # tokens that its last load brought
    failed: bool = False  # a load, after which the request began again
    on_gpu: int = 0  # tokens whose KV the runner has written; drafts rejected are not counted
    stale: int = 0  # outputs on their way from before the last preemption or failed load
    drop_stale: bool = False
    in_flight: int = 0
    in_flight_tokens: int = 0
    mixed: bool = False  # some of its KV was computed with replaced weights
    lora_request: Adapter | None = None
    answer: dict[str, object] | None = None  # what the client is told about its KV

    @property
    def cache_salt(self) -> str | None:
        return self.salt or None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.all_token_ids)

    @property
    def holds_blocks(self) -> bool:
        """True if it has any block, of its own or shared."""
        return any(any(table) for table in self.tables)

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of all whole blocks, each over the blocks before it, too."""
        hasher, hashes = hashlib.sha256(self.salt.encode()), []
        for end in range(BLOCK, self.num_tokens + 1, BLOCK):
            hasher.update(bytes(self.all_token_ids[end - BLOCK : end]))
            hashes.append(hasher.digest())
        return hashes

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens


@dataclass
class Scheduled:
    """A request's part in a step, as the runner sees it."""

    request: FakeRequest
    count: int
    drafts: int
    samples: bool
    tables: list[list[int]]


@dataclass
class Step:
    """A step on its way."""

    plan: StepPlan
    work: list[Scheduled]
    has_loads: bool
    failed_blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # requests whose loads are over
    ended: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)
    report: StepReport | None = None
    outputs: dict[str, list[int]] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)


class Listener:
    """A router that does not count: it believes every event, and must always be right."""

    def __init__(self) -> None:
        self.blocks: dict[Place, dict[bytes, tuple[int, ...]]] = {place: {} for place in ANNOUNCED}

    def hear(self, events: Iterable[Stored | Removed]) -> None:
        """Take in events."""
        for event in events:
            held = self.blocks[event.place]
            if isinstance(event, Removed):
                for name in event.hashes:
                    del held[name]  # no block is taken back that was not announced
                continue
            blocks = event.blocks
            assert len(blocks.token_ids) == BLOCK * len(blocks.hashes)
            assert len(blocks.context.extra_keys) == len(blocks.hashes)
            for number, name in enumerate(blocks.hashes):
                assert name not in held, "said twice"
                held[name] = tuple(blocks.token_ids[number * BLOCK : (number + 1) * BLOCK])


@dataclass(frozen=True)
class CommonSetup:
    """Options of an engine for a model of any kind."""

    folder: Path | None = None
    server: FakeServer | None = None  # a remote tier, shared with others
    gpu_blocks: int = 64
    slots: int = 16
    local_cpu: bool = True
    save_decode: bool = False
    save_tails: bool = True
    min_retrieve_tokens: int = 0
    min_remote_tokens: int = 0
    max_tokens_per_load: int = 0
    max_write_queue: int | None = None
    verify_fraction: float = 0.0
    trace: Path | None = None
    run_ahead: int = 0  # steps planned before the report of the first of them
    drafts: int = 0
    budget: int = 64
    max_running: int = 8
    async_save: bool = False
    eagerness: float | None = None  # of a device that does the work of the model and the workers as late as it may
    overwrites_early: bool = False  # as vLLM's model runner V2: blocks are overwritten before a step is prepared
    copies: bool = False  # some blocks are copied where others would be shared, as by vLLM's model runner V2
    seed: int = 0


@dataclass(frozen=True)
class Setup(CommonSetup):
    """Options of a `FakeVllm`."""

    ranks: int = 1
    stages: tuple[int, ...] = ()  # with pipeline parallelism, the layers of each rank
    replicas: bool = False  # all ranks hold the same KV, as with MLA
    disk_chunks: int = 64
    loads: bool = True
    saves: bool = True
    skip_last_tokens: int = 0
    lookahead_tokens: int = 0
    priority_limit: int | None = None
    defer_stores: bool = False  # a draft model: the report leaves before the stores are done
    async_load: bool | None = False  # loads; None lets the adapter choose
    layerwise: bool = False
    names_layers_early: bool = False  # as micro-batches: layers are named before the model has computed them
    handover: HandoverOptions | None = None
    receiver: FakeServer | None = None  # the receiver of handed-over requests
    push_slots: int = 8
    port: int | None = None  # of the first rank's own server, for other engines
    server_bytes: int = SERVER_BYTES
    remote: RemoteOptions | None = None  # a remote tier over real sockets, with all its options
    peers: tuple[str, ...] | None = None  # other engines, over real sockets
    sources: tuple[str, ...] = ()  # other engines that requests may name
    shared: str | None = None  # a cache server, over real sockets, that engines with a port only read
    lookup_timeout_s: float = 5.0
    hold_s: float | None = None  # how long answers of the remote tier count; None for long
    hot_slots: int = 0  # copies on the device
    staging_chunks: int = 2  # that a buffer on the device holds
    copy_bytes: int = 1  # as of a `DevicePagedKV`


def remote_of(setup: Setup) -> RemoteOptions | None:
    """Return the options of a remote tier in a dictionary or over real sockets, or None without one."""
    if setup.remote is not None:
        return setup.remote
    if setup.port is not None or setup.peers is not None:
        num_sends = 0 if setup.port is None else 64
        peers, timeout_s = setup.peers or (), setup.lookup_timeout_s
        return RemoteOptions(
            None,
            shared=setup.shared,
            lookup_timeout_s=timeout_s,
            hold_s=0.2,
            max_queue=num_sends,
            peers=peers,
            sources=setup.sources,
        )
    if setup.shared is not None:
        return RemoteOptions(setup.shared, lookup_timeout_s=setup.lookup_timeout_s, hold_s=0.2, max_queue=64)
    if setup.server is None:
        return None
    hold_s = REMOTE.hold_s if setup.hold_s is None else setup.hold_s
    timeout_s = setup.lookup_timeout_s
    return replace(REMOTE, max_queue=setup.max_write_queue, lookup_timeout_s=timeout_s, hold_s=hold_s)
