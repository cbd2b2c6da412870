"""Bench lines of work that delays vLLM's scheduler or a request: events, lookups, keys, loads. Limits are targets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory

import torch

from kvstore.adapters.vllm.plan import Fetch, WorkerFacts
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.lookup import RemoteLookup
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.adapters.vllm.scheduler.scheduler import StoreScheduler
from kvstore.adapters.vllm.telemetry.announcer import NO_CONTEXT, Adapter, Announcer
from kvstore.adapters.vllm.worker.background import Background
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import LoadStep, Place, StoreStep, chunk_refs
from kvstore.index.remote_view import RemoteView
from kvstore.memory.slabs import LabelledPool, SlabPool
from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import NO_EXTRAS, Feature, KeyExtras, PrefixHasher
from kvstore.model.layout import KVLayout
from kvstore.tiers import open_tier
from kvstore.tiers.base import Tier, TierSetup, Transfer
from kvstore.tiers.directory import RemoteDirectory
from kvstore.tiers.guards import TierWrapper
from kvstore.tools.bench.geometry import TINY
from kvstore.tools.bench.lines import target
from kvstore.tools.bench.samples import NAMESPACE, require, timed
from kvstore.tools.bench.workbench import Workbench
from kvstore.transfer.lane import Lane
from kvstore.transfer.mover import LoadJob, Mover, StoreJob, as_block_ids

EVENT_CHUNKS = 50_000
EVENT_ROUNDS = 100
LOOKUP_REQUESTS = 256
LOOKUP_LATENCY_S = 0.003
KEY_TOKENS = 131_072
KEY_IMAGES = 1_024
LOAD_CHUNKS = 16
ROUNDS = 15
WAITING_REQUESTS = 500
WAITING_TOKENS = 32_768
_TIMEOUT_S = 0.5  # the default of lookup_timeout_ms
_STEP_S = 0.02  # between two passes, while other requests decode
_POLL_S = 0.0005
_BLOCKS = 16  # blocks of a chunk


@dataclass
class _Request:
    """Request fields that events and lookups need."""

    block_hashes: list[bytes]
    all_token_ids: list[int]
    request_id: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    lora_request: Adapter | None = None


class _Far(TierWrapper):
    """Tier that has every chunk, and answers after ``LOOKUP_LATENCY_S``."""

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        time.sleep(LOOKUP_LATENCY_S)
        return [True] * len(refs)


class _Hanging(TierWrapper):
    """Tier whose reads hang until ``may_answer`` is set, and then fail."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.may_answer = threading.Event()

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        self.may_answer.wait(_TIMEOUT_S * ROUNDS)
        return [Outcome.FAILED] * len(transfers)


@target(
    50e-6,
    "KV event, 50,000 chunks of one prefix",
    "50 us",
    "one chunk more is stored: what is to be announced is found out",
)
def _events() -> list[float]:
    """Return the seconds of each of the last events, after many chunks with the same first blocks were announced."""
    announcer = Announcer(1, lambda *_: NO_CONTEXT)
    index = ChunkIndex(EVENT_CHUNKS + EVENT_ROUNDS, tracks_changes=True)
    system = [b"system %d" % number for number in range(_BLOCKS // 4)]
    seconds = []
    for number in range(EVENT_CHUNKS + EVENT_ROUNDS):
        own = [b"%d of %d" % (block, number) for block in range(_BLOCKS - len(system))]
        ref = ChunkRef(b"%016d" % number, _BLOCKS)
        index.complete_store(index.prepare_store([ref]), set())
        announcer.describe(ref, range(_BLOCKS), _Request([*system, *own], [1] * _BLOCKS))
        took_s, said = timed(lambda: announcer.take(index))
        require(len(said) == 1, f"{len(said)} events for one chunk")
        seconds.append(took_s)
    return seconds[EVENT_CHUNKS:]


@target(
    10e-3,
    "256 lookups at 3 ms, longest pass",
    "10 ms",
    "256 new requests at once, a remote tier that answers after 3 ms: the longest of the scheduler's passes; none may "
    "be computed because nobody answered",
)
def longest_passes() -> Iterator[float]:
    """Yield the seconds of the longest pass of each burst."""
    for _ in range(ROUNDS):
        yield _longest_pass()


def _longest_pass() -> float:
    """Return the seconds of the scheduler's longest pass until a burst of requests is answered completely."""
    layout = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=256)
    waiting = {f"{number}": [ChunkRef(os.urandom(16), 16) for _ in range(8)] for number in range(LOOKUP_REQUESTS)}
    longest_s = 0.0
    with TemporaryDirectory() as folder:
        tier = _Far(open_tier("disk", TierSetup(NAMESPACE, layout, 1 << 20, {"folder": folder})))
        with closing(RemoteLookup(RemoteDirectory([tier]), RemoteView(3.0), _TIMEOUT_S)) as lookup:
            while waiting:
                begin_s = time.perf_counter()
                waiting = {name: refs for name, refs in waiting.items() if not lookup.answered(name, refs)}
                lookup.end_pass()
                longest_s = max(longest_s, time.perf_counter() - begin_s)
                time.sleep(_STEP_S)
            require(not lookup.timeouts, f"{lookup.timeouts} of {LOOKUP_REQUESTS} requests were not answered in time")
    return longest_s


@target(
    3e-3,
    "500 requests of 32,768 tokens wait, a step",
    "3 ms",
    "what each step costs the scheduler while 500 requests wait for a load of their common prefix",
)
def _steps_of_waiting() -> list[float]:
    """Return, for each step, the seconds that the scheduler takes to ask about every waiting request once."""
    layout = KVLayout(page_bytes=(64,), planes=1, block_tokens=16, chunk_tokens=256)
    tokens = list(range(WAITING_TOKENS))
    hasher = PrefixHasher(256, 16)
    hasher.update(tokens)
    held = [(ref, 4096) for ref in chunk_refs(hasher, with_tail=False)]
    rules = LoadRules(async_load=True, only_if_faster=False)
    scheduler = StoreScheduler(
        SchedulerOptions(SaveRules(16, 256, save_decode=False, save_tails=False), load_rules=rules)
    )
    scheduler.connect([WorkerFacts(len(held), 4096, 1 << 30, (4096,) * 16, held, NAMESPACE, layout)])
    with closing(scheduler):
        num_tokens = WAITING_TOKENS + 1
        prompts = [(str(number), [*tokens, number]) for number in range(WAITING_REQUESTS)]
        requests = [_Request([], prompt, name, num_tokens, num_tokens) for name, prompt in prompts]
        for request in requests:
            scheduler.add_request(request, NO_EXTRAS)
        first, *others = requests
        found = scheduler.num_new_matched_tokens(first, 0)
        require(found == WAITING_TOKENS, f"{found} of {WAITING_TOKENS} tokens were found")
        scheduler.allocated(first.request_id, [list(range(1, 2 + WAITING_TOKENS // 16))], WAITING_TOKENS)
        scheduler.plan_step({}, lambda _: [[]])
        seconds = []
        for number in range(ROUNDS + 1):
            took_s, answers = timed(lambda: [scheduler.num_new_matched_tokens(request, 0) for request in others])
            require(answers == [None] * len(others), "some request does not wait")
            if number:  # the first step looks each request up
                seconds.append(took_s)
    return seconds


@target(
    50e-3,
    "load from memory, while a disk hangs",
    "50 ms",
    "an asynchronous load of 16 chunks from memory, until it is seen to have ended; a read of another request hangs",
)
def _loads_beside_a_hanging_disk() -> list[float]:
    """Return the seconds of loads from memory while a read from disk hangs."""
    bench = Workbench(TINY, LOAD_CHUNKS)
    pool = LabelledPool(SlabPool(LOAD_CHUNKS + 1, bench.paged.layout.slot_bytes, torch.device("cpu")))
    refs = [ChunkRef(os.urandom(16), _BLOCKS) for _ in range(LOAD_CHUNKS + 1)]
    ids = [as_block_ids(range(first * _BLOCKS, (first + 1) * _BLOCKS)) for first in range(LOAD_CHUNKS)]
    with TemporaryDirectory() as folder:
        setup = TierSetup(NAMESPACE, bench.paged.layout, 1 << 20, {"folder": folder})
        disk = _Hanging(open_tier("disk", setup))
        mover = Mover(bench.paged, pool, {Place.DISK: Lane(pool, disk, lambda *_: None)})
        background = Background(mover)
        mover.store([StoreJob(StoreStep(refs[slot], slot, ()), blocks) for slot, blocks in enumerate(ids)])
        loads = [LoadJob(LoadStep(refs[slot], slot, Place.MEMORY), blocks, 0) for slot, blocks in enumerate(ids)]
        background.fetch(Fetch(0, "slow", [LoadJob(LoadStep(refs[-1], LOAD_CHUNKS, Place.DISK), ids[0], 0)]))
        seconds = [timed(partial(_load, background, Fetch(number + 1, "brief", loads)))[0] for number in range(ROUNDS)]
        disk.may_answer.set()
        background.stop()
        require(background.wait(_TIMEOUT_S), "a load has not ended")
        mover.close(_TIMEOUT_S)
    return seconds


def _load(background: Background, fetch: Fetch) -> None:
    """Start a load and wait for its end."""
    background.fetch(fetch)
    deadline_s = time.perf_counter() + _TIMEOUT_S
    while fetch.number not in {fetched.fetch.number for fetched in background.take_fetched()}:
        require(time.perf_counter() < deadline_s, "a load from memory waits for a disk that hangs")
        time.sleep(_POLL_S)


@target(100e-3, "keys of 131,072 tokens, 1,024 images", "100 ms", "the keys of a new prompt, from a Python list")
def _keys() -> list[float]:
    """Return the seconds to compute the keys of a prompt full of images, for each round."""
    step = KEY_TOKENS // KEY_IMAGES
    features = tuple(Feature(f"image {number:032x}", number * step, step // 2) for number in range(KEY_IMAGES))
    tokens = [number * 7_919 % 100_003 for number in range(KEY_TOKENS)]
    seconds = []
    for _ in range(ROUNDS):
        hasher = PrefixHasher(256, 16, KeyExtras(features=features))
        took_s, _ = timed(partial(hasher.update, tokens))
        require(len(hasher.chunk_keys()) == KEY_TOKENS // 256, "some chunks got no key")
        seconds.append(took_s)
    return seconds


SCHEDULING = (_events, longest_passes, _steps_of_waiting, _loads_beside_a_hanging_disk, _keys)
