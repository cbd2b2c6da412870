"""A simulated fleet against real engines: the same requests to the same replicas find as much, with each policy."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.cache_server import serving_ipc

from kvstore.engine.engine import CacheEngine
from kvstore.engine.options import EngineOptions, RemoteOptions
from kvstore.model.keys import Namespace
from kvstore.paged.binding import bind_paged_kv
from kvstore.policies.traces import Request
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.tools.simulate.fleet import FleetCell, simulate_fleet
from kvstore.tools.simulate.fleetfile import GIB, FleetPlan
from kvstore.tools.simulate.replica import Replica, Served

BLOCK, MOST_BLOCKS = 4, 300
SLOT_BYTES, FILE_BYTES = 4096, 8192
CHUNK_BYTES = 512  # in the simulation, at a byte a token
CONVERSATION = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
AGREES = 0.02


def made_up(requests: int) -> Iterator[list[int]]:
    """Yield chains of conversations with three system prompts; most return, and some part from where they were."""
    chooser, next_id = random.Random(3), 100
    stems = [list(range(begin, begin + 6)) for begin in (0, 10, 20)]
    open_chains: list[list[int]] = []
    for _ in range(requests):
        if open_chains and chooser.random() < 0.7:
            chain = open_chains.pop(int(len(open_chains) * chooser.random() ** 0.5))
            chain = chain if chooser.random() < 0.9 else chain[: chooser.randint(1, len(chain))]
        else:
            chain = chooser.choice(stems)
        count = chooser.randint(1, 6)
        chain = [*chain, *range(next_id, next_id + count)]
        next_id += count
        open_chains.append(chain)
        yield chain


def write_trace(path: Path, chains: Sequence[Sequence[int]]) -> Path:
    """Write chains of whole blocks, an arrival each second."""
    lines = (
        {"timestamp": 1000 * number, "input_length": 512 * len(chain), "hash_ids": chain}
        for number, chain in enumerate(chains)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


class Engines:
    """Engines with chunks of one block, each over tiers for so many chunks."""

    def __init__(self, folder: Path, policy: str, count: int, sizes: dict[str, int], stack: ExitStack) -> None:
        layers = {"layer": torch.zeros((MOST_BLOCKS, 2, BLOCK, 8), dtype=torch.uint8)}
        paged = bind_paged_kv(layers, num_blocks=MOST_BLOCKS, block_tokens=BLOCK, chunk_tokens=BLOCK)
        remote = None
        if "shared" in sizes:
            server = stack.enter_context(serving_ipc(pool_bytes=sizes["shared"] * PAGE_BYTES, policy=policy))
            remote = RemoteOptions(server.url, hold_s=0.0, max_queue=sizes["memory"])
        self.engines = [
            stack.enter_context(
                CacheEngine(
                    paged,
                    Namespace({"model": "fleet"}),
                    EngineOptions(
                        max_local_cpu_bytes=sizes["memory"] * SLOT_BYTES,
                        local_disk=folder / str(number) if "disk" in sizes else None,
                        max_local_disk_bytes=sizes.get("disk", 0) * FILE_BYTES,
                        max_write_queue=sizes["memory"],
                        cache_policy=policy,
                        use_odirect=False,
                        remote=remote,
                    ),
                )
            )
            for number in range(count)
        ]

    def load(self, number: int, request: Request) -> int:
        """Load a request, and return the blocks that were found."""
        tokens = tokens_of(request)
        return int(self.engines[number].retrieve(tokens, slot_mapping=range(len(tokens))).sum()) // BLOCK

    def store(self, number: int, request: Request) -> None:
        """Store a request, in all tiers."""
        tokens = tokens_of(request)
        self.engines[number].store(tokens, slot_mapping=range(len(tokens)))
        self.engines[number].flush()


def tokens_of(request: Request) -> list[int]:
    """Return a block of tokens for each key."""
    ids = (int.from_bytes(key, "little") for key in request.keys)
    return [BLOCK * block + place for block in ids for place in range(BLOCK)]


def hit_rates(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    replicas: int,
    sizes: dict[str, int],
    *,
    tokens_per_s: float = 1e9,
    router: Literal["prefix", "random"] = "prefix",
) -> tuple[float, float, dict[str, int]]:
    """Return the simulated and the real hit rate, and the chunks that each simulated tier evicted."""
    order: list[tuple[Replica, Request, bool]] = []
    computing: dict[Replica, Request] = {}

    def serve(replica: Replica, request: Request, arrival_s: float, now_s: float) -> Served:
        order.append((replica, request, True))
        computing[replica] = request
        return real(replica, request, arrival_s, now_s)

    def complete(replica: Replica) -> None:
        order.append((replica, computing.pop(replica), False))
        real_complete(replica)

    real, real_complete = Replica.serve, Replica.complete
    monkeypatch.setattr(Replica, "serve", serve)
    monkeypatch.setattr(Replica, "complete", complete)
    tiers = {name: {"size": count * CHUNK_BYTES / GIB, "gb_per_s": 1000.0} for name, count in sizes.items()}
    plan = FleetPlan.model_validate(
        {"bytes_per_token": 1, "prefill_tokens_per_s": tokens_per_s, "replicas": replicas, **tiers}
    )
    row = simulate_fleet(path, plan, FleetCell(policy, replicas, router), answers=True, tick=lambda _: None)
    numbers: dict[Replica, int] = {}
    asked = found = 0
    with ExitStack() as stack:
        engines = Engines(path.parent, policy, replicas, sizes, stack)
        for replica, request, is_load in order:
            number = numbers.setdefault(replica, len(numbers))
            if is_load:
                found += engines.load(number, request)
                asked += len(request.keys)
            else:
                engines.store(number, request)
        loads = [engine.stats().mover for engine in engines.engines]
    assert len(numbers) == replicas
    assert ("disk" in sizes) == any(load.chunks_loaded_from_disk for load in loads)
    assert ("shared" in sizes) == any(load.chunks_loaded_from_remote for load in loads)
    assert row["asked_tokens"] == 512 * asked
    return row["hit_rate"], found / asked, {name: tier["evicted_chunks"] for name, tier in row["tiers"].items()}


@pytest.mark.parametrize(
    ("policy", "replicas", "sizes"),
    [
        ("ADAPTIVE", 1, {"memory": 120}),
        ("LRU", 1, {"memory": 60, "disk": 200}),
        ("LRU", 3, {"memory": 60, "shared": 300}),
        ("ADAPTIVE", 3, {"memory": 60, "shared": 300}),
        ("LRU", 3, {"memory": 60, "disk": 100, "shared": 300}),
        ("S3FIFO", 2, {"memory": 60, "disk": 150}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(value),
)
def test_real_engines_find_as_much(
    policy: str, replicas: int, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "trace.jsonl", list(made_up(500)))
    simulated, real, evicted = hit_rates(path, monkeypatch, policy, replicas, sizes)
    assert all(evicted.values()), "it must be tight"
    assert 0.1 < real < 0.95
    assert abs(simulated - real) <= AGREES


def test_they_do_while_others_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes about a second to compute, in which one arrives at another replica and does not find it."""
    path = write_trace(tmp_path / "trace.jsonl", list(made_up(400)))
    sizes = {"memory": 60, "shared": 150}
    simulated, real, evicted = hit_rates(path, monkeypatch, "LRU", 3, sizes, tokens_per_s=5e3)
    assert all(evicted.values()), "it must be tight"
    assert abs(simulated - real) <= AGREES


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["LRU", "ADAPTIVE"])
def test_they_do_on_a_trace_of_mooncake(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not CONVERSATION.exists():
        pytest.skip(f"the trace is not beside the checkout: no {CONVERSATION.name} in ../shared/traces")
    with CONVERSATION.open(encoding="utf-8") as file:
        chains = [json.loads(line)["hash_ids"] for line in islice(file, 600)]
    path = write_trace(tmp_path / "trace.jsonl", [chain for chain in chains if len(chain) <= MOST_BLOCKS])
    simulated, real, evicted = hit_rates(path, monkeypatch, policy, 2, {"memory": 1500, "disk": 5000}, router="random")
    assert all(evicted.values()), "it must be tight"
    assert abs(simulated - real) <= AGREES
