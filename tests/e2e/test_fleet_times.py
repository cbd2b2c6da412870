"""A simulated fleet beside three real vLLMs and ``kvstore proxy``: as many hits, and times that are printed.

The engines have one thread each and share the processors, so few requests overlap. The speeds that the simulation is
given are measured first, with all three running. Tests assert on hits only.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from support.vllm_engine import CHUNK_TOKENS

from kvstore.policies.traces import Request
from kvstore.tools.demo.pair import EngineServer, ProxyServer
from kvstore.tools.demo.server import VllmServer
from kvstore.tools.models import TINY, as_text, random_tokens
from kvstore.tools.simulate.fleet import Fleet, FleetCell
from kvstore.tools.simulate.fleetfile import FleetPlan
from kvstore.tools.vllmclient import TOKENS_LOADED, complete, read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

REPLICAS, REQUESTS, MOST_CHUNKS = 3, 60, 12
AGREES = 0.02
MEMORY_GIB = 1.0
CONFIG = f"max_local_cpu_size: {MEMORY_GIB}\nload_only_if_faster: false\nchunk_size: {CHUNK_TOKENS}\n"
BYTES_PER_TOKEN: Final = TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 4
BUSY: Final = 0.6  # of one processor


@dataclass
class Speeds:
    """Speeds of an engine that has nothing else to do."""

    prefill_tokens_per_s: float
    first_token_s: float
    gb_per_s: float


class RealFleet:
    """Three engines with a proxy in front of them, which routes by prefix; clients that choose at random go past it."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        self.model = str(model)
        config, listing = folder / "engine.yaml", folder / "engines.json"
        config.write_text(CONFIG, encoding="utf-8")
        self.engines = [
            EngineServer(
                *(model, config, folder / f"{number}.log"),
                drains=False,
                cores=str(number % 2),
                arguments=("--no-enable-prefix-caching",),
            )
            for number in range(REPLICAS)
        ]
        for engine in self.engines:
            stack.push(engine)
        with ThreadPoolExecutor(2, "start") as pool:
            list(pool.map(VllmServer.__enter__, self.engines))
        urls = [engine.url for engine in self.engines]
        listing.write_text(json.dumps({"decode": [{"url": url} for url in urls]}), encoding="utf-8")
        self.proxy = ProxyServer([], [], folder / "proxy.log", ("--engines", str(listing)))
        stack.callback(self.proxy.kill)
        self.proxy.start()

    def ttft_s(self, url: str, prompt: list[int]) -> float:
        """Return the time to a prompt's first token."""
        return complete(url, self.model, as_text(prompt), output_tokens=1).ttft_s

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens that all engines have loaded so far."""
        return sum(read_counter(engine.url, TOKENS_LOADED) for engine in self.engines)

    def measure(self) -> Speeds:
        """Measure each engine alone: whole prompts, and the same again."""
        cold: list[tuple[int, float]] = []
        loads: list[tuple[int, float]] = []
        for number, engine in enumerate(self.engines):
            self.ttft_s(engine.url, random_tokens(600, vocab=TINY.vocab, seed=100 + number))  # the first is slower
            for chunks in (2, 5, 8, 11):
                tokens = chunks * CHUNK_TOKENS
                prompt = random_tokens(tokens + 1, vocab=TINY.vocab, seed=1000 * number + chunks)
                cold.append((tokens, self.ttft_s(engine.url, prompt)))
                loads.append((tokens, statistics.median(self.ttft_s(engine.url, prompt) for _ in range(3))))
        load_s, first_s = statistics.linear_regression(*zip(*loads, strict=True))  # of a token, and of none
        first_s = max(first_s, 1e-3)
        computing_s = sum(seconds - first_s for _, seconds in cold)
        tokens_per_s = sum(tokens for tokens, _ in cold) / computing_s
        return Speeds(tokens_per_s, first_s, BYTES_PER_TOKEN / max(load_s, 1e-9) / 1e9)


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with ExitStack() as stack:
        yield RealFleet(tiny_model, tmp_path_factory.mktemp("fleet"), stack)


@pytest.fixture(scope="module")
def speeds(fleet: RealFleet) -> Speeds:
    return fleet.measure()


def chains(seed: int) -> Iterator[list[int]]:
    """Yield the chunks of conversations by number, with two system prompts; most return and grow."""
    chooser, next_id = random.Random(seed), 1000 * seed
    stems = [list(range(next_id + 900 + 10 * number, next_id + 903 + 10 * number)) for number in range(2)]
    going: list[list[int]] = []
    for _ in range(REQUESTS):
        chain = going.pop(chooser.randrange(len(going))) if going and chooser.random() < 0.7 else chooser.choice(stems)
        count = chooser.randint(1, 3)
        chain = [*chain, *range(next_id, next_id + count)]
        next_id += count
        if len(chain) + 3 <= MOST_CHUNKS:
            going.append(chain)
        yield chain


def requests(seed: int, speeds: Speeds) -> list[Request]:
    """Return a trace whose prompts, if all were computed, would keep one processor busy for a part of the time."""
    chooser, time_s, found = random.Random(seed), 0.0, []
    for chain in chains(seed):
        tokens = len(chain) * CHUNK_TOKENS
        keys = tuple(number.to_bytes(8, "little") for number in chain)
        found.append(Request(time_s, keys, CHUNK_TOKENS, CHUNK_TOKENS, tokens, answer_tokens=1))
        time_s += chooser.expovariate(BUSY / (tokens / speeds.prefill_tokens_per_s + speeds.first_token_s))
    return found


def prompt_of(request: Request) -> list[int]:
    """Return whole chunks of tokens, and one more, since the last token of a prompt is always computed."""
    ids = (int.from_bytes(key, "little") for key in request.keys)
    chunks = [random_tokens(CHUNK_TOKENS, vocab=TINY.vocab, seed=1_000_000 + number) for number in ids]
    return [*(token for chunk in chunks for token in chunk), 7]


def replay(fleet: RealFleet, trace: Sequence[Request], router: str) -> list[float]:
    """Send the requests at their times, and return the times to their first tokens."""
    chooser = random.Random(1)  # as the simulation's
    prompts = [prompt_of(request) for request in trace]
    with ThreadPoolExecutor(len(trace), "client") as pool:
        begin_s, sent = time.monotonic(), []
        for request, prompt in zip(trace, prompts, strict=True):
            time.sleep(max(0.0, begin_s + request.time_s - time.monotonic()))
            url = fleet.proxy.url if router == "prefix" else chooser.choice(fleet.engines).url
            sent.append(pool.submit(fleet.ttft_s, url, prompt))
        return [each.result() for each in sent]


@pytest.mark.parametrize(("router", "seed"), [("random", 1), ("prefix", 2)])
def test_real_vllms_find_as_much(
    router: str, seed: int, fleet: RealFleet, speeds: Speeds, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = requests(seed, speeds)
    plan = FleetPlan.model_validate(
        {
            "bytes_per_token": BYTES_PER_TOKEN,
            "prefill_tokens_per_s": speeds.prefill_tokens_per_s,
            "first_token_s": speeds.first_token_s,
            "replicas": REPLICAS,
            "router": router,
            "memory": {"size": MEMORY_GIB, "gb_per_s": speeds.gb_per_s},
            "load_only_if_faster": False,
        }
    )
    simulated = Fleet(plan, FleetCell(plan.policy[0], REPLICAS, plan.router[0]))
    for request in trace:
        simulated.ask(request)
    simulated.end()
    row = simulated.to_json()
    before = fleet.loaded_tokens
    times_s = replay(fleet, trace, router)
    hit_rate = (fleet.loaded_tokens - before) / row["asked_tokens"]
    real = {"p50": statistics.median(times_s), "mean": statistics.fmean(times_s)}
    with capsys.disabled():
        print(f"\n{router}: {speeds}; hits simulated {row['hit_rate']:.4f}, real {hit_rate:.4f}; TTFT", end="")
        for name, real_s in real.items():
            told_s = row["ttft_s"][name]
            print(f" {name}: simulated {told_s:.3f} s, real {real_s:.3f} s, ratio {told_s / real_s:.2f}", end="")
        print()
    assert 0.2 < hit_rate < 0.95
    assert abs(row["hit_rate"] - hit_rate) <= AGREES
