"""TTFT gained if prefill reads the KV of answers from the decode engine: ``kvstore bench --bidirectional``.

A chat of three turns over a real prefill engine, a real decode engine and the proxy. The prompt of each turn is the
previous prompt, its answer, and new user tokens; only the decode engine has the answer's KV. The later turns are asked
in pairs, one right after the other. *One way*, the prefill engine computes the KV that it lacks. *Both ways*, it gets
the ``kv_transfer_params`` of the decode engine. TTFT is the time to an answer of one token through the proxy.

The prefill engine either has the previous prompt in vLLM's prefix cache, so that it lacks only the answer, or that
cache was emptied, as other requests would do. The lengths of answers are candidates for ``min_remote_tokens``, the
length from which on answers are read both ways.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from rich.table import Table

from kvstore.tools.bench.samples import BenchError
from kvstore.tools.bench.vllm import require_vllm
from kvstore.tools.console import numbers
from kvstore.tools.demo.pair import Disaggregation
from kvstore.tools.interrupts import Interruption
from kvstore.tools.models import DEMO, TINY, LlamaShape, build_llama, count_words
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import REQUEST_TIMEOUT_S, Work
from kvstore.tools.vllmserver import ServerFailedError

MODELS: Final = {"12 layers, 1,024 wide": DEMO, "4 layers, 256 wide": TINY}
ANSWER_TOKENS: Final = (32, 64, 128, 256, 512)  # whole blocks
FIRST_TOKENS: Final = 609  # one more than whole blocks: the last token of an answer has no KV
SAID_TOKENS: Final = 32
TURNS: Final = (2, 3)
_LINES: Final = "enable_pd: true\npd_bidirectional: true\nload_only_if_faster: false\n"
_BUFFER_BYTES: Final = 1 << 30
_HAS: Final = {True: "the prompt before", False: "nothing"}

Said = dict[str, Any] | None
"""``kv_transfer_params`` of an answer, which locate its KV."""


class Case(NamedTuple):
    """One request shape, repeated in every round.

    Attributes:
        has_prompt: whether the prefill engine has the previous prompt in its prefix cache.
        answer_tokens: tokens of each answer in the chat.
        turn: number of the turn, from 1 on.
    """

    has_prompt: bool
    answer_tokens: int
    turn: int


class Sample(NamedTuple):
    """Seconds to a first token, and the tokens that the prefill engine computed for it, one way and both ways."""

    one_way_s: float
    both_ways_s: float
    one_way_tokens: int
    both_ways_tokens: int


class Engines:
    """A real prefill and a real decode engine, behind the proxy or asked directly."""

    def __init__(self, pair: Disaggregation, client: httpx.Client) -> None:
        self._pair = pair
        self._client = client
        self._work = Work(pair.prefill.url)

    def answer(self, prompt: Sequence[int], said: Said, num_tokens: int) -> tuple[list[int], Said]:
        """Return the tokens of an answer, and the ``kv_transfer_params`` of its KV."""
        tree = self._ask(self._pair.proxy.url, prompt, said, num_tokens)
        self._work.of(prompt)
        return tree["choices"][0]["token_ids"], tree["kv_transfer_params"]

    def forget(self) -> None:
        """Empty the prefill engine's prefix cache."""
        self._client.post(f"{self._pair.prefill.url}/reset_prefix_cache").raise_for_status()

    def prepare(self, prompt: Sequence[int], said: Said) -> None:
        """Put a prompt into the prefill engine's prefix cache."""
        self._ask(self._pair.prefill.url, prompt, said, 1)
        self._work.of(prompt)

    def first_token(self, prompt: Sequence[int], said: Said) -> tuple[float, int]:
        """Return the seconds to a first token, and the tokens that the prefill engine computed for it."""
        begin_s = time.perf_counter()
        self._ask(self._pair.proxy.url, prompt, said, 1)
        return time.perf_counter() - begin_s, self._work.of(prompt)

    def _ask(self, url: str, prompt: Sequence[int], said: Said, num_tokens: int) -> dict[str, Any]:
        body = {"model": self._pair.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True, **({"kv_transfer_params": said} if said else {})}
        answer = self._client.post(f"{url}/v1/completions", json=body | more).raise_for_status()
        tree: dict[str, Any] = answer.json()
        return tree


Found = dict[Case, list[Sample]]


def measure_bidirectional(rounds: int, folder: Path) -> dict[str, Found]:
    """Return samples by model; after an interruption, of the models measured until then.

    Raises:
        ConfigError: vLLM is not installed.
        BenchError: an engine or the proxy did not start, or stopped responding.
    """
    require_vllm()
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-bidirectional-", dir=folder) as made:
        for number, (name, shape) in enumerate(MODELS.items()):
            place = Path(made, str(number))
            try:
                with _started(shape, place) as engines:
                    found[name] = converse(engines, rounds, count_words(shape.vocab))
            except Interruption:
                break
            except (ServerFailedError, httpx.HTTPError, TimeoutError) as error:
                raise BenchError(f"the engines for {name}: {error}") from error
    return found


def converse(engines: Engines, rounds: int, num_words: int) -> Found:
    """Play one chat for each length of answers, and ask each later turn one way and both ways in every round."""
    chooser = random.Random(0)  # noqa: S311 - the same prompts in every run

    def words(count: int) -> list[int]:
        return chooser.choices(range(num_words), k=count)

    found: Found = {}
    for answer_tokens in ANSWER_TOKENS:
        prompt = words(FIRST_TOKENS)
        for turn in TURNS:
            answer, said = engines.answer(prompt, None, answer_tokens)
            context = [*prompt, *answer]
            for number, has_prompt in product(range(rounds + 1), (True, False)):
                pair = {}
                for is_told in (False, True) if number % 2 else (True, False):
                    engines.forget()
                    if has_prompt:
                        engines.prepare(prompt, said)
                    pair[is_told] = engines.first_token([*context, *words(SAID_TOKENS)], said if is_told else None)
                if number:  # the first round warms up
                    one_way, both_ways = pair[False], pair[True]
                    sample = Sample(one_way[0], both_ways[0], one_way[1], both_ways[1])
                    found.setdefault(Case(has_prompt, answer_tokens, turn), []).append(sample)
            prompt = [*context, *words(SAID_TOKENS)]
    return found


def pays_from(found: Found, *, has_prompt: bool) -> int | None:
    """Return the shortest answer from which on reading is faster than computing; None if the longest is not faster."""
    shortest = None
    for answer_tokens in reversed(ANSWER_TOKENS):
        if _ratio([one for turn in TURNS for one in found[Case(has_prompt, answer_tokens, turn)]]) >= 1:
            break
        shortest = answer_tokens
    return shortest


def bidirectional_table(name: str, found: Found) -> Table:
    """Return a table of one model's medians by cached prompt and answer length, and from which length reading pays."""
    figures = [figure for turn in TURNS for figure in (f"turn {turn}: TTFT one way", "both ways", "ratio")]
    title = f"a random Llama of {name}: chats of three turns, the first of {FIRST_TOKENS} tokens"
    verdicts = [f"{_HAS[has_prompt]}: {_verdict(pays_from(found, has_prompt=has_prompt))}" for has_prompt in _HAS]
    threshold = pays_from(found, has_prompt=True)
    if threshold is not None and threshold > ANSWER_TOKENS[0]:
        verdicts.append(f"where load_only_if_faster is false: min_remote_tokens: {threshold}")
    columns = numbers("tokens of an answer", "computed one way", "both ways", *figures)
    table = Table("prefill has", *columns, title=title, caption="\n".join(verdicts))
    for has_prompt, answer_tokens in product(_HAS, ANSWER_TOKENS):
        is_first = answer_tokens == ANSWER_TOKENS[0]
        if is_first:
            table.add_section()
        turns = [found[Case(has_prompt, answer_tokens, turn)] for turn in TURNS]
        computed = [statistics.median(column) for column in list(zip(*turns[-1], strict=True))[2:]]
        table.add_row(
            _HAS[has_prompt] if is_first else "",
            f"{answer_tokens}",
            *(f"{tokens:.0f}" for tokens in computed),
            *(cell for samples in turns for cell in _times(samples)),
        )
    return table


def to_json(found: Mapping[str, Found]) -> dict[str, list[dict[str, object]]]:
    """Return every sample of every case, by model."""
    return {
        name: [{**case._asdict(), "samples": [one._asdict() for one in samples]} for case, samples in cases.items()]
        for name, cases in found.items()
    }


def _times(samples: Sequence[Sample]) -> tuple[str, str, str]:
    one_way_s = statistics.median(one.one_way_s for one in samples)
    both_ways_s = statistics.median(one.both_ways_s for one in samples)
    return f"{one_way_s * 1e3:.0f} ms", f"{both_ways_s * 1e3:.0f} ms", f"{_ratio(samples):.2f}"


def _ratio(samples: Sequence[Sample]) -> float:
    """Return the median over the pairs of the TTFT both ways as a share of the TTFT one way."""
    return statistics.median(one.both_ways_s / one.one_way_s for one in samples)


def _verdict(shortest: int | None) -> str:
    if shortest is None:
        return f"to compute answers of up to {ANSWER_TOKENS[-1]} tokens is as fast as to read them"
    return f"to read pays from answers of {shortest} tokens on"


@contextmanager
def _started(shape: LlamaShape, folder: Path) -> Iterator[Engines]:
    """Run real engines, a core for each, until the end of the block."""
    folder.mkdir()
    model = build_llama(folder / "model", shape)
    port = free_port()
    pair = Disaggregation(
        *(model, folder),
        # The prefill engine keeps KV only in vLLM's prefix cache, which can be emptied.
        prefill=f"{_LINES}local_cpu: false\nmax_local_cpu_size: 0.25\npd_allowed_hosts: 127.0.0.1:{port}\n",
        decode=f"{_LINES}max_local_cpu_size: 0.5\npd_peer_init_port: {port}\npd_buffer_size: {_BUFFER_BYTES}\n",
        options=("--decode-kv", f"kvs://127.0.0.1:{port}"),
        environment={"VLLM_SERVER_DEV_MODE": "1"},  # to empty the prefix cache
    )
    with pair, httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
        yield Engines(pair, client)
