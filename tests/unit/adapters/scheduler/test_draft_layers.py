"""Draft layers of EAGLE and MTP: the KV of a token there follows from the next ones, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.fake_parts import BLOCK, CHUNK, Scheduled, Setup, Step, kv_of, sample
from support.fake_vllm import FakeVllm

SHARED = list(range(2 * CHUNK))


class Drafting(FakeVllm):
    """One engine of one rank, whose last layer is that of a draft model."""

    def _write(self, step: Step, part: Scheduled, tokens: list[int], start: int) -> None:
        request, blocks = part.request, part.tables[0]
        ahead, values = self.setup.lookahead_tokens, kv_of("", tokens)
        known = [*tokens, *request.all_token_ids[len(tokens) :]]
        while len(known) < len(tokens) + ahead:
            known.append(sample(known))
        following = np.array([sum(known[place + 1 : place + 1 + ahead]) for place in range(len(tokens))])
        for layer, right in zip(self.caches[0], (values, values + following), strict=True):
            assert (layer[blocks].reshape(-1)[:start] == right[:start]).all(), f"wrong bytes of {request.request_id}"
            for position in range(start, len(tokens)):
                layer[blocks[position // BLOCK], position % BLOCK] = right[position]


@pytest.fixture(params=[False, True], ids=["within steps", "asynchronous"])
def vllm(request: pytest.FixtureRequest) -> Iterator[Drafting]:
    """Yield an engine with a draft layer that looks at the next token."""
    engine = Drafting(Setup(lookahead_tokens=1, async_load=request.param))
    yield engine
    engine.close()


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("num_tokens", [CHUNK, CHUNK + BLOCK, 2 * CHUNK], ids=["a chunk", "a front", "two chunks"])
def test_a_hit_ends_where_the_next_tokens_are_known(num_tokens: int, ahead: int) -> None:
    """Compute the last tokens that two prompts share again, with the right next ones."""
    engine = Drafting(Setup(lookahead_tokens=ahead))
    try:
        for name, last in (("first", 40), ("other", 41)):
            engine.forget_local()
            engine.ask(name, [*SHARED[:num_tokens], *[last] * CHUNK])
        assert engine.loaded_tokens["other"] == num_tokens - ahead
    finally:
        engine.close()


def test_a_prompt_asked_again_ends_before_its_last_whole_block(vllm: Drafting) -> None:
    for name in ("first", "again"):
        vllm.forget_local()
        vllm.ask(name, SHARED, max_tokens=3)
    assert vllm.loaded_tokens["again"] == 2 * CHUNK - 1


def test_the_block_that_vllm_drops_is_not_brought_back_whole(vllm: Drafting) -> None:
    vllm.ask("first", [*SHARED, 40])
    request = vllm.add("other", [*SHARED, 41])
    assert vllm.scheduler.num_new_matched_tokens(request, 2 * CHUNK - BLOCK) == BLOCK - 1
    assert vllm.scheduler.num_new_matched_tokens(request, 2 * CHUNK) == 0


def test_prompts_that_diverge_after_a_shared_chunk(vllm: Drafting) -> None:
    for name, last in (("first", 40), ("other", 41), ("third", 42)):
        vllm.forget_local()
        vllm.ask(name, [*SHARED[:CHUNK], *[last] * CHUNK])
        assert vllm.loaded_tokens[name] == (0 if name == "first" else CHUNK - 1)
