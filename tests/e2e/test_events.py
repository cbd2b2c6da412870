"""Tests of KV events: a listener to vLLM's own events knows which blocks are in memory and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import zmq
from support.vllm_engine import BLOCK_TOKENS, CHUNK_TOKENS, Engine, Prompt, StoreSetup, make_prompts

from kvstore.index.plans import Place
from kvstore.model.keys import NO_EXTRAS, PrefixHasher

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

CHUNK_GIB = 256 * 4 * 2 * 2 * 64 * 4 / 2**30  # tokens, layers, K and V, heads, head size, float32
MEDIA = {"CPU": Place.MEMORY, "STORAGE": Place.DISK}


class Router:
    """Listener that applies each event literally, like a router that does not count references."""

    def __init__(self, endpoint: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self.blocks: dict[str, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.named: dict[Any, tuple[int, ...]] = {}  # a block's tokens by its hash, from vLLM's own events
        self.extra_keys: dict[Any, object] = {}  # what else the hash covers, likewise
        self.removed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)

    def hear(self, timeout_ms: int = 500) -> int:
        """Apply all published events; return the number of batches."""
        batches = 0
        while self._socket.poll(timeout_ms):
            batches += 1
            for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                self._take(event)
        return batches

    def _take(self, event: Any) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

        if isinstance(event, AllBlocksCleared):
            self.blocks["GPU"].clear()  # vLLM sends it when its own prefix cache is emptied
            return
        held = self.blocks[event.medium]
        if isinstance(event, BlockRemoved):
            held.difference_update(event.block_hashes)
            self.removed.add(event.medium)
            return
        held.update(event.block_hashes)
        assert event.block_size == BLOCK_TOKENS
        assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
        for number, name in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])
            extra_keys = event.extra_keys[number] if event.extra_keys else None
            if event.medium == "GPU":
                self.named[name], self.extra_keys[name] = tokens, extra_keys
            else:
                assert self.named[name] == tokens, "the hash is vLLM's own for these tokens"
                assert self.extra_keys[name] == extra_keys
                assert event.parent_block_hash is None or event.parent_block_hash in self.named


def expected(engine: Engine, prompts: list[Prompt], router: Router, place: Place) -> set[Any]:
    """Return the hashes of all blocks of the prompts' chunks that the index has in a place."""
    names = {tokens: name for name, tokens in router.named.items()}  # random tokens: no two blocks are alike
    found = set()
    for prompt in prompts:
        hasher = PrefixHasher(CHUNK_TOKENS, BLOCK_TOKENS, NO_EXTRAS)
        hasher.update(prompt)
        for chunk in range(len(hasher.chunk_keys()) + 1):
            for number, key in enumerate(hasher.block_keys(chunk), 1):
                if engine.store_scheduler.index.holds(key, place):
                    begin = chunk * CHUNK_TOKENS
                    ends = range(begin, begin + number * BLOCK_TOKENS, BLOCK_TOKENS)
                    found |= {names[tuple(prompt[token : token + BLOCK_TOKENS])] for token in ends}
    return found


def test_routers_know_what_is_where(tiny_model: Path, tmp_path: Path) -> None:
    from vllm.config import KVEventsConfig

    prompts = [prompt for prompt in make_prompts(seed=5) if len(prompt) > 2 * BLOCK_TOKENS][::3]
    endpoint = "inproc://kv-events"
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    store = StoreSetup(tmp_path / "disk", cpu_gib=6.5 * CHUNK_GIB, disk_gib=12 * CHUNK_GIB)
    with Engine(tiny_model, store, kv_events_config=events) as engine, Router(endpoint) as router:
        while not router.hear(50):  # until the subscription has arrived
            assert len(prompts) < 50
            prompts.append([len(prompts)] * 40)
            engine.generate(prompts[-1:])
        for _ in range(2):
            engine.generate(prompts)
            engine.settle()
            router.hear()
            for medium, place in MEDIA.items():
                assert router.blocks[medium] == expected(engine, prompts, router, place), medium
            engine.forget_local()
        assert router.removed >= {"CPU", "STORAGE"}
        assert router.blocks["STORAGE"] - router.blocks["CPU"]
        engine.generate(prompts[:1], salts=["red"])
        engine.settle()
        router.hear()
        salted = {name for name, extra_keys in router.extra_keys.items() if extra_keys}
        assert [router.extra_keys[name] for name in salted & router.blocks["CPU"]] == [("red",)]
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.settle()
        router.hear()
        assert not router.blocks["CPU"]
        assert not router.blocks["STORAGE"]
