"""Tests of chats over two real vLLMs, where the prefill engine takes the KV of each answer from the decode engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.disaggregated import PATIENT, Disaggregation, Work
from support.redis_server import wait_for
from support.vllm_engine import BLOCK_TOKENS, Engine, Prompt

from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import stream

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

ANSWER_TOKENS = 100
SAID_TOKENS = (300, 45, 70)  # tokens of the user in each turn
LINES = f"enable_pd: true\npd_bidirectional: true\nmax_local_cpu_size: 0.25\nload_only_if_faster: false\n{PATIENT}"


class Turn(NamedTuple):
    """A prompt, and the answer of plain vLLM."""

    prompt: Prompt
    answer: Prompt


@pytest.fixture(scope="module")
def chats(tiny_model: Path) -> list[list[Turn]]:
    """Return two chats without ties, at which two answers would be right."""
    found: list[list[Turn]] = []
    with Engine(tiny_model) as engine:
        for seed in range(10):
            turns = played(engine, seed)
            if turns:
                found.append(turns)
    assert len(found) >= 2
    return found[:2]


def played(engine: Engine, seed: int) -> list[Turn]:
    """Return the turns of a chat, whose prompts begin with the last prompt and answer; none if there is a tie."""
    turns: list[Turn] = []
    prompt: Prompt = []
    for number, num_tokens in enumerate(SAID_TOKENS):
        prompt = [*prompt, *random_tokens(num_tokens, vocab=TINY.vocab, seed=100 * seed + number)]
        (output,) = engine.generate([prompt], max_tokens=ANSWER_TOKENS, logprobs=2)
        if output.tie_at is not None:
            return []
        turns.append(Turn(prompt, output.token_ids))
        prompt = [*prompt, *output.token_ids]
    return turns


@contextmanager
def engines(model: Path, folder: Path, *, prefill: str) -> Iterator[Disaggregation]:
    """Start both engines, with an extra line for the prefill engine, in which PORT stands for the decode engine's."""
    port = free_port()
    with Disaggregation(
        *(model, folder),
        prefill=f"{LINES}{prefill.replace('PORT', str(port))}\n",
        decode=f"{LINES}pd_peer_init_port: {port}\npd_buffer_size: {256 << 20}\n",
        options=("--decode-kv", f"kvs://127.0.0.1:{port}", "--bidirectional"),
    ) as running:
        yield running


def ask(running: Disaggregation, prompt: Prompt, said: dict[str, Any] | None) -> tuple[Prompt, dict[str, Any]]:
    """Return the tokens of a streamed answer, and its description of its KV."""
    request = {"model": running.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "return_token_ids": True}
    tokens: Prompt = []
    params: dict[str, Any] = {}
    for _, event in stream(running.proxy.url, request | ({"kv_transfer_params": said} if said else {})):
        params = event.get("kv_transfer_params") or params
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
    return tokens, params


def computed_by_prefill(
    running: Disaggregation, chat: Sequence[Turn], *, says: bool, before: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Return the tokens that prefill computes in each turn. The client ``says`` where the last answer's KV is."""
    work, computed = Work(running.prefill), list[int]()
    said: dict[str, Any] = {}
    for number, turn in enumerate(chat):
        before(number)
        tokens, said = ask(running, turn.prompt, said if says else None)
        assert tokens == turn.answer
        computed.append(work.of(turn.prompt))
    return computed


def new_tokens(chat: Sequence[Turn], *, with_answer: bool) -> list[int]:
    """Return each turn's tokens that neither engine has computed; ``with_answer``, those that prefill has not."""
    known = [0]
    for turn in chat[:-1]:
        num_tokens = len(turn.prompt) + (0 if with_answer else len(turn.answer) - 1)  # the last one has no KV
        known.append(num_tokens - num_tokens % BLOCK_TOKENS)
    return [len(turn.prompt) - num_known for turn, num_known in zip(chat, known, strict=True)]


@pytest.mark.soak
def test_a_client_says_where_the_kv_of_an_answer_is(tiny_model: Path, tmp_path: Path, chats: list[list[Turn]]) -> None:
    """Without the client's parameters, prefill computes the answers again."""
    told, untold = chats
    with engines(tiny_model, tmp_path, prefill="pd_allowed_hosts: 127.0.0.1:PORT") as running:
        assert computed_by_prefill(running, told, says=True) == new_tokens(told, with_answer=False)
        assert computed_by_prefill(running, untold, says=False) == new_tokens(untold, with_answer=True)


@pytest.mark.soak
def test_with_peers_clients_need_not_say_anything(tiny_model: Path, tmp_path: Path, chats: list[list[Turn]]) -> None:
    chat, admin = chats[0], free_port()
    new = new_tokens(chat, with_answer=False)
    lines = f"internal_api_server_enabled: true\ninternal_api_server_port_start: {admin}\n"
    with engines(tiny_model, tmp_path, prefill=f"{lines}peers: kvs://127.0.0.1:PORT") as running:

        def is_there(number: int) -> bool:
            """Tell if a peer has what precedes a turn; decode stores the end of its answer after it has given it."""
            asked = {"tokens": chat[number].prompt}
            answer = httpx.post(f"http://127.0.0.1:{admin}/kv", json=asked, trust_env=False).json()
            return len(chat[number].prompt) - int(answer["known_tokens"]) <= new[number]

        def before(number: int) -> None:
            wait_for("decode has stored the answer", lambda: not number or is_there(number))

        assert computed_by_prefill(running, chat, says=False, before=before) == new
