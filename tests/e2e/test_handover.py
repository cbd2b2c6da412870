"""Tests of two real vLLMs and the proxy: one computes prompts and hands them over, the other decodes."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.disaggregated import Disaggregation, Work, unshared
from support.hybrid_models import MAKERS
from support.network import runs_elsewhere
from support.redis_server import wait_for
from support.relay import Mood, Relay
from support.vllm_engine import BLOCK_TOKENS, Engine, Prompt

from kvstore.model.keys import Namespace
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.harness import EVEN
from kvstore.tools.models import TINY, as_text, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

OUTPUT_TOKENS = 40
USER_TOKENS = 30
SPARE_CHATS = 10  # in place of those whose answers cannot be written as text
TEMPLATE = "{% for message in messages %} {{ message['content'] }}{% endfor %}"
DEADLINE_S = 3.0  # in tests where chunks do not arrive
PATIENCE_S = 60.0  # in tests where they do, even on a busy machine
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
ADDRESS = "127.0.0.2"  # on loopback, but used by nothing else
LINES = f"""
enable_pd: true
pd_bidirectional: {{both_ways}}
pd_buffer_size: {256 << 20}
pd_timeout_ms: {{timeout_ms}}
blocking_timeout_secs: {{call_s}}
lookup_timeout_ms: {{lookup_ms}}
max_local_cpu_size: {{cpu_gib}}
load_only_if_faster: false
"""


class Turn(NamedTuple):
    """A prompt, the answer of plain vLLM, and how much of it comes before the first tie."""

    prompt: Prompt
    answer: Prompt
    sure_tokens: int
    words: list[str]


class Chat(NamedTuple):
    """A user's prompts, and the answers of plain vLLM."""

    users: list[Prompt]
    turns: list[Turn]

    def is_text(self, engine: Engine) -> bool:
        """Tell if all answers can be written as text; the vocabulary has a few tokens that are no words."""
        encode = engine.llm.get_tokenizer().encode
        return all(encode(as_text(turn.answer), add_special_tokens=False) == turn.answer for turn in self.turns)

    def messages(self, number: int) -> list[dict[str, str]]:
        """Return the conversation up to a turn."""
        messages = []
        for user, turn in zip(self.users[:number], self.turns[:number], strict=True):
            messages += [
                {"role": "user", "content": as_text(user)},
                {"role": "assistant", "content": as_text(turn.answer)},
            ]
        return [*messages, {"role": "user", "content": as_text(self.users[number])}]


def answered(engine: Engine, prompts: Sequence[Prompt]) -> list[Turn]:
    turns = []
    for prompt, output in zip(prompts, engine.generate(prompts, max_tokens=OUTPUT_TOKENS, logprobs=2), strict=True):
        sure = output.token_ids[: output.tie_at]
        words = engine.llm.get_tokenizer().decode(sure).split()
        turns.append(Turn(list(prompt), output.token_ids, len(sure), words))
    return turns


def plain(model: Path, num_prompts: int, num_chats: int, num_turns: int) -> tuple[list[Turn], list[Chat]]:
    """Return the answers of one plain vLLM to prompts of all lengths, and in chats."""
    lengths = [1 + (37 * number * number) % 1500 for number in range(num_prompts - 4)] + [32, 256, 257, 1500]
    prompts = [random_tokens(length, vocab=TINY.vocab, seed=length) for length in lengths]
    chats = []
    for seed in range(num_chats + SPARE_CHATS):
        sizes = [200 + 13 * seed] + [USER_TOKENS] * (num_turns - 1)
        users = [random_tokens(size, vocab=TINY.vocab, seed=1000 * seed + n) for n, size in enumerate(sizes)]
        chats.append(Chat(users, []))
    with Engine(model) as engine:
        turns = answered(engine, prompts)
        for number in range(num_turns):
            sofar = [[*chat.turns[-1].prompt, *chat.turns[-1].answer] if number else [] for chat in chats]
            asked = [[*tokens, *chat.users[number]] for tokens, chat in zip(sofar, chats, strict=True)]
            for chat, turn in zip(chats, answered(engine, asked), strict=True):
                chat.turns.append(turn)
        kept = [chat for chat in chats if chat.is_text(engine)][:num_chats]
    assert len(kept) == num_chats
    return turns, kept


@contextmanager
def engines(
    model: Path,
    folder: Path,
    *,
    both_ways: bool = True,
    cpu_gib: float = 0.25,
    host: str = "127.0.0.1",
    deadline_s: float = PATIENCE_S,
    arguments: Sequence[str] = (),
) -> Iterator[Disaggregation]:
    """Start both engines, with one core each, and the proxy; KV is pushed to the decode engine's own server."""
    folder.mkdir(exist_ok=True)
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    port = free_port()
    lines = LINES.format(
        both_ways=str(both_ways).lower(),
        cpu_gib=cpu_gib,
        timeout_ms=int(deadline_s * 1000),
        call_s=deadline_s / 2,
        lookup_ms=int(deadline_s * 500),
    )
    options = ["--decode-kv", f"kvs://{host}:{port}", *(["--bidirectional"] if both_ways else [])]
    with Disaggregation(
        model,
        folder,
        prefill=f"{lines}pd_allowed_hosts: {host}:{port}\n",
        decode=f"{lines}pd_peer_host: {host}\npd_peer_init_port: {port}\n",
        arguments=("--chat-template", str(template), *arguments),
        options=options,
    ) as running:
        yield running


def ask(running: Disaggregation, turn: Turn, **more: Any) -> dict[str, Any]:
    """Send a prompt through the proxy, and check that the answer is plain vLLM's."""
    # Tokens, because one that is half a character is written differently as the others come one by one.
    asked = {"prompt": turn.prompt, "max_tokens": OUTPUT_TOKENS, "return_token_ids": True, **more}
    answer = running.ask("/v1/completions", asked)
    assert answer["choices"][0]["token_ids"][: turn.sure_tokens] == turn.answer[: turn.sure_tokens]
    return answer


def chat_on(running: Disaggregation, chat: Chat, number: int, params: object) -> dict[str, Any]:
    """Play one turn of a chat, with the KV parameters of the last answer."""
    body = {"messages": chat.messages(number), "max_completion_tokens": OUTPUT_TOKENS}
    if params is not None:
        body["kv_transfer_params"] = params
    answer = running.ask("/v1/chat/completions", body)
    turn = chat.turns[number]
    assert answer["usage"]["prompt_tokens"] == len(turn.prompt)
    assert answer["choices"][0]["message"]["content"].split()[: len(turn.words)] == turn.words
    return answer


def play(running: Disaggregation, turns: Sequence[Turn], chats: Sequence[Chat]) -> None:
    """Play all prompts and chats; check that the decode engine never computes more than the end of a prompt."""
    decode, prefill = Work(running.decode), Work(running.prefill)
    for turn in turns:
        ask(running, turn)
        assert decode.of(turn.prompt) <= unshared(turn.prompt)
        prefill.of(turn.prompt)
    params: list[object] = [None] * len(chats)
    for number in range(len(chats[0].users)):
        for position, chat in enumerate(chats):
            prompt = chat.turns[number].prompt
            answer = chat_on(running, chat, number, params[position])
            params[position] = answer["kv_transfer_params"]
            assert decode.of(prompt) <= unshared(prompt)
            prefilled_tokens = prefill.of(prompt)
            if number:
                known_tokens = len(chat.turns[number - 1].prompt) + OUTPUT_TOKENS - 1
                new_tokens = len(prompt) - known_tokens // BLOCK_TOKENS * BLOCK_TOKENS
                assert prefilled_tokens <= new_tokens


def test_a_few_prompts_and_a_chat(tiny_model: Path, tmp_path: Path) -> None:
    turns, chats = plain(tiny_model, num_prompts=6, num_chats=1, num_turns=2)
    with engines(tiny_model, tmp_path) as running:
        play(running, turns, chats)


@pytest.mark.soak
def test_fifty_prompts_and_ten_chats(tiny_model: Path, tmp_path: Path) -> None:
    turns, chats = plain(tiny_model, num_prompts=50, num_chats=10, num_turns=4)
    with engines(tiny_model, tmp_path) as running:
        play(running, turns, chats)


@pytest.mark.soak
def test_windows_are_handed_over(tmp_path: Path) -> None:
    """The windows are sent with the prompt's chunks, so that the decode engine computes only the end."""
    model = MAKERS["gptoss"](tmp_path / "gptoss")
    turns, _ = plain(model, num_prompts=8, num_chats=0, num_turns=1)
    with engines(model, tmp_path / "engines") as running:
        decode = Work(running.decode)
        for turn in turns:
            ask(running, turn)
            num_tokens = len(turn.prompt)
            assert decode.of(turn.prompt) <= num_tokens - (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.soak
@pytest.mark.parametrize("both_ways", [True, False])
def test_what_the_prefill_engine_has_evicted_comes_from_the_decode_engine(
    tiny_model: Path, tmp_path: Path, *, both_ways: bool
) -> None:
    """Without this feature the prefill engine would recompute all of it."""
    turns, (chat, other) = plain(tiny_model, num_prompts=5, num_chats=2, num_turns=3)
    uncached = ("--no-enable-prefix-caching",)
    with engines(tiny_model, tmp_path, both_ways=both_ways, cpu_gib=0.003, arguments=uncached) as running:
        params: object = None
        for number in range(len(chat.users)):
            prompt, prefill = chat.turns[number].prompt, Work(running.prefill)
            params = chat_on(running, chat, number, params).get("kv_transfer_params")
            taken = prefill.of(prompt)
            if not both_ways or not number:
                assert taken == len(prompt)
            else:
                known_tokens = len(chat.turns[number - 1].prompt) + OUTPUT_TOKENS - 1
                assert taken <= len(prompt) - known_tokens // BLOCK_TOKENS * BLOCK_TOKENS
            for turn in [*turns, other.turns[number]]:  # push the chat out of the prefill engine's memory
                ask(running, turn)
                prefill.of(turn.prompt)


@pytest.mark.soak
def test_engines_and_proxy_that_die(tiny_model: Path, tmp_path: Path) -> None:
    """Outputs are right, or a clean error comes in time; the surviving processes leak nothing and continue."""
    turns, _ = plain(tiny_model, num_prompts=8, num_chats=1, num_turns=1)
    longest = turns[-1]
    with engines(tiny_model, tmp_path) as running:
        ask(running, turns[0])

        running.proxy.kill()
        running.proxy.start()
        ask(running, turns[1])

        killer = threading.Timer(0.15, running.prefill.kill)  # in the middle of the longest prompt
        killer.start()
        ask(running, longest)
        killer.join()
        for turn in turns[2:4]:
            ask(running, turn)
        running.prefill.start()
        settle(running)
        decode = Work(running.decode)
        ask(running, turns[4])
        assert decode.of(turns[4].prompt) <= unshared(turns[4].prompt)  # handed over again

        killer = threading.Timer(0.3, running.decode.kill)
        killer.start()
        begin_s = time.monotonic()
        with httpx.Client(trust_env=False, timeout=60) as client:
            body = {"model": running.model, "prompt": turns[5].prompt, "max_tokens": 1000, "ignore_eos": True}
            failed = client.post(f"{running.proxy.url}/v1/completions", json=body)
        killer.join()
        assert failed.status_code in {502, 503, 504}
        assert failed.json()["error"]["message"]
        assert time.monotonic() - begin_s < 30
        running.decode.start()
        settle(running)
        for turn in turns[5:]:
            ask(running, turn)
        assert_nothing_held(running)


@pytest.mark.soak
def test_a_network_that_is_blocked(tiny_model: Path, tmp_path: Path) -> None:
    """The engines continue without each other within the deadline, and with each other once the network works."""
    if runs_elsewhere(f"{__file__}::test_a_network_that_is_blocked"):
        return
    turns, _ = plain(tiny_model, num_prompts=9, num_chats=1, num_turns=1)
    with engines(tiny_model, tmp_path, host=ADDRESS, deadline_s=DEADLINE_S) as running:
        ask(running, turns[0])
        route("add")
        for turn in turns[1:4]:
            decode, begin_s = Work(running.decode), time.monotonic()
            ask(running, turn)
            assert decode.of(turn.prompt) == len(turn.prompt)
            assert time.monotonic() - begin_s < DEADLINE_S + 20  # a busy machine, and a model to run
        route("del")
        settle(running)
        for turn in turns[4:]:
            decode = Work(running.decode)
            ask(running, turn)
            assert decode.of(turn.prompt) <= unshared(turn.prompt)
        assert_nothing_held(running)


def route(action: str) -> None:
    """Drop all packets to the decode engine's address, or stop dropping them."""
    subprocess.run(["ip", "route", action, "blackhole", ADDRESS, "table", "local"], check=True)


@pytest.mark.soak
def test_a_host_that_is_not_allowed(tiny_model: Path, tmp_path: Path) -> None:
    turns, _ = plain(tiny_model, num_prompts=5, num_chats=1, num_turns=1)
    with engines(tiny_model, tmp_path) as running, httpx.Client(trust_env=False, timeout=60) as client:
        for turn in turns:
            spec = {"req_id": "r", "receiver_host": "192.0.2.1", "receiver_init_port": 80, "receiver_alloc_port": 80}
            body = {
                "model": running.model,
                "prompt": turn.prompt,
                "max_tokens": 1,
                "kv_transfer_params": {"disagg_spec": spec},
            }
            answer = client.post(f"{running.prefill.url}/v1/completions", json=body).json()
            assert answer["kv_transfer_params"] is None
        log = running.prefill.log.read_text(encoding="utf-8", errors="replace")
        assert log.count("'192.0.2.1'") == 1
        assert "pd_allowed_hosts" in log


def settle(running: Disaggregation) -> None:
    """Wait until the proxy and the prefill engine detect that a process is back."""
    time.sleep(11)
    with httpx.Client(trust_env=False, timeout=30) as client:
        assert client.get(f"{running.proxy.url}/health").status_code == 200


def assert_nothing_held(running: Disaggregation) -> None:
    """Check at rest that nothing is leased, and that every slot in use holds a chunk."""
    for engine in (running.prefill, running.decode):
        with httpx.Client(trust_env=False, timeout=30) as client:
            lines = client.get(f"{engine.url}/metrics").text.splitlines()
        values = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:kvstore_")
        }
        assert values["vllm:kvstore_leases"] == 0
        assert values["vllm:kvstore_used_slots"] <= values["vllm:kvstore_known_chunks"]


@pytest.mark.sweep
def test_receivers_that_are_slow_refuse_hang_or_are_cut_off(tiny_model: Path, tmp_path: Path) -> None:
    """Outputs equal plain vLLM's. A wait for the deadline of ten minutes would exceed this test's time limit."""
    turns, _ = plain(tiny_model, num_prompts=10, num_chats=0, num_turns=1)
    turns = sorted(turns, key=lambda turn: -len(turn.prompt))[:6]
    port = free_port()
    foreign = EmbeddedServer(Namespace({"model": "another"}), EVEN, EmbeddedOptions(1 << 20, "127.0.0.1", 0))
    # A call may wait for a busy processor; one that is hung is given up long before ten minutes all the same.
    lines = LINES.format(both_ways="false", cpu_gib=0.25, timeout_ms=600_000, call_s=10, lookup_ms=10_000)
    with closing(foreign), Relay(port) as relay:
        decode = f"{lines}pd_peer_init_port: {port}\n"
        options = ["--decode-kv", f"kvs://127.0.0.1:{relay.port}"]
        with Disaggregation(tiny_model, tmp_path, prefill=lines, decode=decode, options=options) as running:
            work = Work(running.decode)

            def computed(turn: Turn) -> int:
                ask(running, turn)
                return work.of(turn.prompt)

            assert computed(turns[0]) <= unshared(turns[0].prompt)
            relay.mood = Mood.SLOW
            assert computed(turns[1]) <= unshared(turns[1].prompt)
            relay.mood = Mood.HUNG
            assert computed(turns[2]) == len(turns[2].prompt)
            relay.mood = Mood.FAST
            settle(running)
            assert computed(turns[3]) <= unshared(turns[3].prompt)
            relay.mood = Mood.CUT
            assert computed(turns[4]) == len(turns[4].prompt)
            relay.aim(foreign.port)  # first: whoever waits connects at once, and stays
            relay.mood = Mood.FAST
            settle(running)
            assert computed(turns[5]) == len(turns[5].prompt)
            assert_nothing_held(running)
            assert read_counter(running.decode.url, "vllm:kvstore_handover_timeouts_total") == 0


@pytest.mark.sweep
def test_a_receiver_that_is_full_and_a_sender_that_dies(tiny_model: Path, tmp_path: Path) -> None:
    """With a buffer of eight chunks, the received ones are used, and the rest is computed or read at the sender.

    A wait for the deadline of ten minutes would exceed this test's time limit.
    """
    turns, _ = plain(tiny_model, num_prompts=11, num_chats=0, num_turns=1)
    by_length = {len(turn.prompt): turn for turn in turns}
    *_, short, kept, dying, long, longest = (by_length[length] for length in sorted(by_length))
    port, kept_port, num_chunks = free_port(), free_port(), 8
    lines = LINES.format(both_ways="true", cpu_gib=0.25, timeout_ms=600_000, call_s=3, lookup_ms=3_000)
    lines = "".join(f"{line}\n" for line in lines.splitlines() if "pd_buffer_size" not in line) + "chunk_size: 64\n"
    where = f"pd_peer_init_port: {port}\npd_allowed_hosts: 127.0.0.1:{kept_port}\n"
    with Disaggregation(
        tiny_model,
        tmp_path,
        prefill=f"{lines}pd_buffer_size: {256 << 20}\n",
        decode=f"{lines}{where}pd_buffer_size: {num_chunks * 64 * TOKEN_BYTES}\n",
        options=["--decode-kv", f"kvs://127.0.0.1:{port}"],
    ) as running:
        work = Work(running.decode)
        for turn in (longest, long):
            assert len(turn.prompt) > 12 * 64
            ask(running, turn)
            assert len(turn.prompt) - num_chunks * 64 <= work.of(turn.prompt) < len(turn.prompt)
        killer = threading.Timer(0.15, running.prefill.kill)  # in the middle of a prompt
        killer.start()
        ask(running, dying)
        killer.join()
        running.prefill.config.write_text(f"{running.prefill.config.read_text()}pd_peer_init_port: {kept_port}\n")
        running.prefill.start()
        settle(running)
        let_save(running, kept)
        work = Work(running.decode)
        for turn in (short, kept):
            ask(running, turn)
            assert work.of(turn.prompt) <= unshared(turn.prompt)
        assert len(kept.prompt) > num_chunks * 64
        assert_nothing_held(running)
        assert read_counter(running.decode.url, "vllm:kvstore_handover_timeouts_total") == 0


def let_save(running: Disaggregation, turn: Turn) -> None:
    """Let the prefill engine compute a prompt, and save it for other engines."""
    body = {"model": running.model, "prompt": turn.prompt, "max_tokens": 1}
    with httpx.Client(trust_env=False, timeout=60) as client:
        assert client.post(f"{running.prefill.url}/v1/completions", json=body).status_code == 200

    def has_kept() -> bool:
        with httpx.Client(trust_env=False, timeout=60) as client:  # what was written counts with the next step
            client.post(f"{running.prefill.url}/v1/completions", json={**body, "prompt": [1, 2]})
        written = read_counter(running.prefill.url, "vllm:kvstore_writes_total", {"result": "done"})
        return written >= len(turn.prompt) // 64

    wait_for("the prompt is kept", has_kept)
