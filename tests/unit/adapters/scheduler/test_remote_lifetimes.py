"""Times to live of prompts that vLLM's scheduler sends to a remote tier, and loads from there."""

from __future__ import annotations

import time

import pytest
from support.fake_parts import CHUNK, Setup
from support.fake_vllm import one_after_the_other
from support.remote import FakeServer

from kvstore.adapters.vllm.requests.params import RequestParams

PROMPT = list(range(2 * CHUNK + 1))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keeps_lifetimes", [True, False])
def test_the_first_prompt_is_sent_with_its_end(ranks: int, *, keeps_lifetimes: bool) -> None:
    """The scheduler knows before the first report of a worker if the tier keeps it."""
    server = FakeServer()
    server.keeps_lifetimes = keeps_lifetimes
    with one_after_the_other(Setup(server=server, ranks=ranks)) as build:
        vllm = build()
        begin_s = time.time()
        vllm.ask("first", PROMPT, params=RequestParams(ttl_s=600.0))
        vllm.settle()
        assert len(server.ends) == (2 if keeps_lifetimes else 0)
        assert len(server.puts) == (2 * ranks if keeps_lifetimes else 0)
        assert all(begin_s + 600 <= end_s <= time.time() + 600 for end_s in server.ends.values())


def test_who_loads_a_prompt_finds_it_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    server.keeps_lifetimes = True
    with one_after_the_other(Setup(server=server)) as build:
        vllm = build()
        vllm.ask("first", PROMPT, params=RequestParams(ttl_s=600.0))
        vllm.settle()
        other = build()
        other.ask("loads", PROMPT, params=RequestParams(skip_save=True))
        other.settle()
        assert other.loaded_tokens["loads"] == 2 * CHUNK
        ahead_s, real = 601.0, (time.monotonic, time.time)
        monkeypatch.setattr(time, "monotonic", lambda: real[0]() + ahead_s)
        monkeypatch.setattr(time, "time", lambda: real[1]() + ahead_s)
        other.forget_local()
        other.ask("later", PROMPT)
        other.settle()
        assert not other.loaded_tokens["later"]
        index = other.scheduler.index
        assert index is not None
        assert index.counters.expired == 2
