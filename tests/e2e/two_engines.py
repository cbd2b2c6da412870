"""Chats over a prefill and a decode engine and the proxy, with `pd_bidirectional` and without: a table of both.

    PYTHONPATH=tests python tests/e2e/two_engines.py

Real vLLM on the CPU, float32, one core each, the demonstration's model. The prefill engine has no prefix cache of
vLLM's, so what it does not compute comes from its own small memory or from the decode engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from support.disaggregated import Disaggregation
from support.redis_server import wait_for

from kvstore.tools.demo.client import read_counter, stream
from kvstore.tools.models import DEMO, build_llama, random_tokens
from kvstore.tools.processes import free_port

ANSWER_TOKENS = 64
SAID_TOKENS = 40
FIRST_TOKENS = 600
LINES = """
enable_pd: true
pd_bidirectional: {both_ways}
max_local_cpu_size: {cpu_gib}
load_only_if_faster: false
"""


class Turn(NamedTuple):
    """One turn of a chat, as the client saw it, and what the prefill engine computed for it."""

    prompt_tokens: int
    computed_tokens: int
    ttft_s: float


def engines(model: Path, folder: Path, *, both_ways: bool) -> Disaggregation:
    """Both engines and the proxy."""
    folder.mkdir()
    port = free_port()
    prefill = LINES.format(both_ways=str(both_ways).lower(), cpu_gib=0.05) + f"pd_allowed_hosts: 127.0.0.1:{port}\n"
    decode = LINES.format(both_ways=str(both_ways).lower(), cpu_gib=0.5) + f"pd_peer_init_port: {port}\n"
    options = ["--decode-kv", f"kvs://127.0.0.1:{port}", *(["--bidirectional"] if both_ways else [])]
    arguments = ("--no-enable-prefix-caching",)
    return Disaggregation(model, folder, prefill=prefill, decode=decode, arguments=arguments, options=options)


def ask(running: Disaggregation, prompt: list[int], params: object) -> tuple[list[int], object, float]:
    """A streamed answer: its tokens, what it says of its KV, and the seconds to its first token."""
    request = {"model": running.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "return_token_ids": True}
    tokens: list[int] = []
    said: object = None
    ttft_s = 0.0
    for seconds, event in stream(running.proxy.url, request | ({"kv_transfer_params": params} if params else {})):
        said = event.get("kv_transfer_params") or said
        for choice in event["choices"]:
            ttft_s = ttft_s or seconds
            tokens += choice.get("token_ids") or []
    return tokens, said, ttft_s


def play(running: Disaggregation, seed: int, num_turns: int) -> list[Turn]:
    """A chat."""
    turns: list[Turn] = []
    prompt = random_tokens(FIRST_TOKENS, vocab=DEMO.vocab, seed=seed)
    params: object = None
    url = running.prefill.url
    for number in range(num_turns):
        asked, cached = (read_counter(url, f"vllm:prompt_tokens{name}_total") for name in ("", "_cached"))
        tokens, params, ttft_s = ask(running, prompt, params)
        wait_for(
            "vLLM counts",
            lambda: read_counter(url, "vllm:prompt_tokens_total") == asked + len(prompt),  # noqa: B023
        )
        computed = len(prompt) - (read_counter(url, "vllm:prompt_tokens_cached_total") - cached)
        turns.append(Turn(len(prompt), computed, ttft_s))
        prompt = [*prompt, *tokens, *random_tokens(SAID_TOKENS, vocab=DEMO.vocab, seed=1000 * seed + number)]
    return turns


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        model = build_llama(Path(home, "model"), DEMO)
        results: dict[bool, list[list[Turn]]] = {}
        for both_ways in (True, False):
            with engines(model, Path(home, f"both-{both_ways}"), both_ways=both_ways) as running:
                play(running, seed=0, num_turns=1)  # whatever is done only once
                results[both_ways] = [play(running, 1 + seed, given.turns) for seed in range(given.chats)]
    print("| turn | prompt tokens | computed by prefill | TTFT, median | computed, one way | TTFT, median |")
    print("|---|---|---|---|---|---|")
    for number in range(given.turns):
        cells = [str(number + 1), str(results[True][0][number].prompt_tokens)]
        for both_ways in (True, False):
            turns = [chat[number] for chat in results[both_ways]]
            cells += [
                f"{statistics.median(turn.computed_tokens for turn in turns):.0f}",
                f"{statistics.median(turn.ttft_s for turn in turns):.2f} s",
            ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
