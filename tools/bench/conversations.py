"""Conversations over real vLLM, for ``kvstore bench --turns``.

In the *cold* pass, a conversation is asked turn by turn, each prompt being the last one and a few hundred tokens more.
Then vLLM's prefix cache is emptied, as other requests would do, and the *warm* pass asks the same conversation again.
Each connector runs next to two vLLMs without a connector. All three are alive at the same time and asked in turn;
comparing the two plain ones shows the noise. TTFT is the time to the first token. Throughput is measured over several
last turns at once.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from kvstore.adapters.vllm.flag import connector_config
from kvstore.model.errors import ConfigError
from kvstore.tools.bench.samples import BenchError
from kvstore.tools.bench.servers import Child, child, private_redis, private_server
from kvstore.tools.bench.vllm import VOCABULARY, environment, require_vllm
from kvstore.tools.console import numbers
from kvstore.tools.interrupts import Interruption
from kvstore.tools.models import DEMO, build_llama

MODULE: Final = "kvstore.adapters.vllm.offline.conversations"
MARK: Final = "BENCH ANSWER "
CONNECTORS: Final = ("example", "memory", "disk", "redis", "server")  # vLLM's ExampleConnector; kvstore by tier
PLAIN, CONTROL = "plain vLLM", "plain vLLM, again"
TURNS: Final = 4
TURN_TOKENS: Final = 400
TOGETHER: Final = 3  # conversations whose last turns are asked at once
ANSWER_TOKENS: Final = 16
_WRITES_S: Final = 1.0  # for write-behind to finish
_POOL_GIB: Final = 1.0

Transfer = dict[str, Any] | None
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Samples:
    """Samples of one vLLM: seconds to each turn's first token, and tokens per second of several last turns at once."""

    cold_ttft_s: list[float] = field(default_factory=list)
    warm_ttft_s: list[float] = field(default_factory=list)
    cold_tokens_per_s: list[float] = field(default_factory=list)
    warm_tokens_per_s: list[float] = field(default_factory=list)
    warm_cached_share: list[float] = field(default_factory=list)


def parse_connectors(text: str) -> list[str]:
    """Parse names of ``CONNECTORS``, separated by commas; ``all`` means all of them.

    Raises:
        ConfigError: there is no such connector.
    """
    names = list(CONNECTORS) if text == "all" else text.split(",")
    for name in names:
        if name not in CONNECTORS:
            raise ConfigError(f"--turns knows {', '.join(CONNECTORS)} and all, not {name!r}")
    return names


def measure_turns(
    connectors: list[str], rounds: int, folder: Path, redis_server: Path | None
) -> dict[str, dict[str, Samples]]:
    """Return samples by connector, each with those of its two plain vLLMs; if interrupted, of the connectors before.

    Raises:
        ConfigError: vLLM is not installed, or a server does not start.
        BenchError: a vLLM ended.
    """
    require_vllm()
    found = {}
    with tempfile.TemporaryDirectory(prefix="kvstore-turns-", dir=folder) as made:
        model = build_llama(Path(made) / "model", DEMO)
        for connector in connectors:
            place = Path(made) / connector
            place.mkdir()
            try:
                found[connector] = _measure(connector, model, rounds, place, redis_server)
            except Interruption:
                break
    return found


def _measure(connector: str, model: Path, rounds: int, folder: Path, redis_server: Path | None) -> dict[str, Samples]:
    with ExitStack() as stack:
        transfer = stack.enter_context(_transfer(connector, folder, redis_server))
        engines = {
            name: stack.enter_context(_engine(model, given))
            for name, given in ((PLAIN, None), (connector, transfer), (CONTROL, None))
        }
        return _converse(engines, rounds)


def turns_table(found: dict[str, dict[str, Samples]]) -> Table:
    """Return a table of medians."""
    figures = numbers("TTFT cold", "TTFT warm", "tokens/s cold", "tokens/s warm", "found again")
    title = f"conversations of {TURNS} turns, {TURN_TOKENS} tokens each: TTFT of a turn, tokens a second"
    table = Table("connector", "vLLM", *figures, title=title)
    for connector, samples in found.items():
        for name, one in samples.items():
            table.add_row(
                connector if name == connector else "",
                "with it" if name == connector else name,
                *(f"{statistics.median(ttft_s) * 1e3:.0f} ms" for ttft_s in (one.cold_ttft_s, one.warm_ttft_s)),
                *(f"{statistics.median(speed):.1f}" for speed in (one.cold_tokens_per_s, one.warm_tokens_per_s)),
                f"{statistics.median(one.warm_cached_share):.0%}",
            )
        table.add_section()
    return table


def _converse(engines: dict[str, Ask], rounds: int) -> dict[str, Samples]:
    """Send each round's conversations to every vLLM before the next round; the first vLLM alternates.

    A conversation yields a TTFT sample per turn, so ``rounds / TURNS`` conversations give ``rounds`` samples.
    """
    chooser = random.Random(0)  # noqa: S311 - the same prompts in every run
    samples = {name: Samples() for name in engines}
    for number in range(math.ceil(rounds / TURNS) + 1):
        conversations = [_conversation(chooser) for _ in range(1 + TOGETHER)]
        for name in list(engines)[:: 1 if number % 2 else -1]:
            one = _ask_all(engines[name], conversations)
            if number:  # the first round warms up
                for kept, fresh in zip(vars(samples[name]).values(), vars(one).values(), strict=True):
                    kept.extend(fresh)
    return samples


def _ask_all(ask: Ask, conversations: list[list[list[int]]]) -> Samples:
    single, *others = conversations
    last = [turns[-1] for turns in others]
    samples = Samples()
    for ttft_s, tokens_per_s in (
        (samples.cold_ttft_s, samples.cold_tokens_per_s),
        (samples.warm_ttft_s, samples.warm_tokens_per_s),
    ):
        for prompt in single:
            answer = ask({"prompts": [prompt], "max_tokens": 1})
            ttft_s.append(answer["seconds"])
            if ttft_s is samples.warm_ttft_s and prompt is single[0]:
                samples.warm_cached_share.append(answer["cached_tokens"][0] / len(prompt))
        seconds = ask({"prompts": last, "max_tokens": ANSWER_TOKENS})["seconds"]
        tokens_per_s.append(len(last) * ANSWER_TOKENS / seconds)
        time.sleep(_WRITES_S)
        ask({"forget": True})
    return samples


def _conversation(chooser: random.Random) -> list[list[int]]:
    """Return the prompts of a conversation's turns; each begins with the one before."""
    tokens = [chooser.randrange(5, VOCABULARY) for _ in range(TURNS * TURN_TOKENS)]
    return [tokens[: (turn + 1) * TURN_TOKENS] for turn in range(TURNS)]


@contextmanager
def _transfer(connector: str, folder: Path, redis_server: Path | None) -> Iterator[Transfer]:
    """Yield the KV transfer configuration of a connector, while the server that it needs runs."""
    if connector == "example":
        yield {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        return
    settings: dict[str, Any] = {"max_local_cpu_size": _POOL_GIB, "local_cpu": connector == "memory"}
    with ExitStack() as stack:
        if connector == "disk":
            settings |= {"local_disk": str(folder), "max_local_disk_size": 4 * _POOL_GIB}
        elif connector == "redis":
            port = stack.enter_context(private_redis(redis_server, folder))
            settings["remote_url"] = f"redis://127.0.0.1:{port}"
        elif connector == "server":
            short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-")))
            settings["remote_url"] = stack.enter_context(private_server(short, 2 << 30))[0]
        yield {
            **connector_config(),
            "kv_connector_extra_config": {f"kvstore.{key}": value for key, value in settings.items()},
        }


@contextmanager
def _engine(model: Path, transfer: Transfer) -> Iterator[Ask]:
    """Run vLLM in a separate process, and yield a function that sends it a task."""
    with child(MODULE, str(model), json.dumps(transfer), mark=MARK, env=environment()) as process:
        _answer(process)

        def ask(task: dict[str, Any]) -> dict[str, Any]:
            process.tell(json.dumps(task))
            return _answer(process)

        yield ask


def _answer(process: Child) -> dict[str, Any]:
    said = process.said()
    if not said:
        raise BenchError(f"a vLLM ended: {process.complaint()}")
    answer: dict[str, Any] = json.loads(said)
    return answer
