"""Random actions of clients, operators, servers and disks on a simulated vLLM."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from kvstore.adapters.vllm.requests.params import NO_PARAMS, WITHOUT_CACHE, RequestParams
from kvstore.model.errors import TierError
from support.fake_parts import BLOCK, LAYERS, FakeRequest
from support.fake_scheduler import FakeScheduler
from support.invariants import check_invariants
from support.remote import FakeServer

HEADER = 4096


class RandomClient:
    """Random events for one engine; with faults, also events that break tiers."""

    reset_preempts = 1.0  # share of changes of weights that preempt running requests

    def __init__(self, vllm: FakeScheduler, *, with_faults: bool) -> None:
        self.vllm = vllm
        self.random = vllm.random
        self.with_faults = with_faults
        self.requests: list[FakeRequest] = []
        self.pinned: list[tuple[list[int], str, tuple[tuple[str, str], ...]]] = []
        stems = [[self.random.randrange(50) for _ in range(60)] for _ in range(2)]
        self.prompts = [[*stem[: self.random.randrange(1, 60)], self.random.randrange(50)] for stem in stems * 4]

    def play(self, *, events: int = 60) -> None:
        """Do as many events, and check all that is left: stored chunks must be right, and nothing may be held."""
        for _ in range(events):
            self.act()
        self.vllm.scheduler.enabled = True
        if self.vllm.late is not None:
            self.vllm.late.failures.clear()
        self.vllm.settle()
        for prompt, salt, tags in self.pinned:
            self.vllm.ask("unpin", prompt, salt=salt, params=replace(WITHOUT_CACHE, pin=False, tags=tags))
        self.vllm.settle()
        self.vllm.assert_nothing_leaked()
        for prompt in self.prompts:
            self.vllm.forget_local()
            self.vllm.ask("again", prompt)
        self.vllm.settle()
        self.vllm.assert_nothing_leaked()
        check_invariants(self.vllm.index)

    def act(self) -> None:
        """Do one random event."""
        chance = self.random.random()
        if chance < 0.35 and len(self.alive()) < 6:
            self.send()
        elif chance < 0.40 and (alive := self.alive()):
            self.vllm.abort(self.random.choice(alive))
        elif chance < 0.44 and self.vllm.running:
            self.vllm.preempt(self.random.choice(self.vllm.running))
        elif chance < 0.48:
            self.vllm.forget_local()
        elif chance < 0.49:
            self.vllm.reset(preempt=self.random.random() < self.reset_preempts)
        elif chance < 0.55 and self.with_faults and self.vllm.setup.folder is not None:
            self.break_a_file()
        elif chance < 0.58 and self.vllm.setup.server is not None:
            self.upset(self.vllm.setup.server)
        elif chance < 0.60:
            self.vllm.scheduler.enabled = self.random.random() < 0.6
        elif chance < 0.605:
            self.vllm.scheduler.call_soon(self.vllm.scheduler.clear)
        elif chance < 0.615 and self.vllm.late is not None:
            self.vllm.sleep()
        elif chance < 0.63 and self.vllm.late is not None and self.with_faults:
            self.vllm.late.become_full(is_under_way=self.random.random() < 0.5)
        else:
            self.vllm.step()

    def alive(self) -> list[FakeRequest]:
        """Return the requests that have not ended."""
        return [request for request in self.requests if request.state != "finished"]

    def send(self) -> None:
        """Send a request: a prompt that others share, or the next turn of a chat."""
        done = [request for request in self.requests if request.state == "finished"]
        tokens = list(self.random.choice(self.prompts))
        if done and self.random.random() < 0.3:
            tokens = [*self.random.choice(done).all_token_ids, *tokens][:70]
        name = f"request {len(self.requests)}"
        salt = self.random.choice(["", "", "salt"])
        params = self.wishes() if self.random.random() < 0.4 else NO_PARAMS
        if params.pin:
            self.pinned.append((tokens, salt, params.tags))
        priority = self.random.randint(0, 1)
        max_tokens = self.random.randint(1, 12)
        request = self.vllm.add(name, tokens, max_tokens=max_tokens, salt=salt, priority=priority, params=params)
        self.requests.append(request)

    def wishes(self) -> RequestParams:
        """Return random wishes of a request for its KV."""
        return RequestParams(
            skip_save=self.random.random() < 0.2,
            skip_load=self.random.random() < 0.2,
            ttl_s=self.random.choice([None, 1e-6, 1000.0]),
            demote=self.random.random() < 0.1,
            drop=self.random.random() < 0.1,
            prefetch_s=self.random.choice([None, 1e-6, 0.02, 30.0]),
        )

    def upset(self, server: FakeServer) -> None:
        """Let a server evict chunks at random, fail, and recover."""
        server.lose(ref for ref in server.all_chunks() if self.random.random() < 0.5)
        for call in ("before_contains", "before_get", "before_put"):
            fails = self.with_faults and self.random.random() < 0.3
            setattr(server, call, _broken if fails else lambda: None)

    def break_a_file(self) -> None:
        """Delete, cut or flip a file on one rank's disk."""
        files = self.vllm.chunk_files(self.random.randrange(len(self.vllm.workers)))
        if files:
            break_file(self.random.choice(files), self.random)


def _broken() -> None:
    raise TierError("broken on purpose")


def break_file(path: Path, chooser: random.Random) -> None:
    """Delete, cut or flip a chunk's file."""
    try:
        content = bytearray(path.read_bytes())
        how = chooser.randrange(3)
        if how == 0:
            path.unlink()
        elif how == 1 or len(content) <= HEADER:
            path.write_bytes(content[: len(content) // 2])
        else:
            content[HEADER + chooser.randrange(BLOCK * 8 * LAYERS)] ^= 0x40
            path.write_bytes(content)
    except FileNotFoundError:
        return  # it was evicted meanwhile
