"""Chats over a prefill and a decode engine, both simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvstore.tools.bench import bidirectional
from kvstore.tools.bench.bidirectional import ANSWER_TOKENS, Case, Said, bidirectional_table, converse, pays_from
from kvstore.tools.cli import app
from kvstore.tools.interrupts import INTERRUPTED, Interruption
from kvstore.tools.models import LlamaShape
from kvstore.tools.vllmserver import ServerFailedError

BLOCK_TOKENS = 32
ROUNDS = 7
TOKEN_S = 0.001


def common_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return same - same % BLOCK_TOKENS


class Engines(bidirectional.Engines):
    """A prefill engine that remembers the prompts since it was emptied, and a decode engine that remembers all."""

    def __init__(self, *, reading_s: float = 0.1) -> None:
        self._reading_s = reading_s  # whatever its length
        self.asked: list[tuple[int, bool]] = []  # number of tokens, and if the prefill engine was told
        self._prefill: list[list[int]] = []
        self._decode: list[list[int]] = []

    def answer(self, prompt: Sequence[int], said: Said, num_tokens: int) -> tuple[list[int], Said]:
        answer = [(prompt[-1] + number) % 1000 for number in range(num_tokens)]
        self._decode.append([*prompt, *answer][:-1])
        self._prefill.append(list(prompt))
        return answer, {"remote_host": "decode"}

    def forget(self) -> None:
        self._prefill.clear()

    def prepare(self, prompt: Sequence[int], said: Said) -> None:
        assert said is not None
        self._prefill.append(list(prompt))

    def first_token(self, prompt: Sequence[int], said: Said) -> tuple[float, int]:
        self.asked.append((len(prompt), said is not None))
        own = max((common_blocks(prompt, known) for known in self._prefill), default=0)
        all_ = max((common_blocks(prompt, known) for known in self._decode), default=0) if said else own
        self._prefill.append(list(prompt))
        return (len(prompt) - all_) * TOKEN_S + (self._reading_s if all_ > own else 0.0), len(prompt) - all_


def test_an_answer_is_computed_one_way_and_read_both_ways() -> None:
    found = converse(Engines(), ROUNDS, 1000)
    assert found.keys() == {
        Case(has_prompt, tokens, turn) for has_prompt in (True, False) for tokens in ANSWER_TOKENS for turn in (2, 3)
    }
    for (has_prompt, answer_tokens, turn), samples in found.items():
        assert len(samples) == ROUNDS
        for one in samples:
            new_tokens = 33  # the user's message, and the answer's last token
            assert one.both_ways_tokens == new_tokens
            if has_prompt:
                assert one.one_way_tokens == answer_tokens + new_tokens
            else:
                assert one.one_way_tokens == 609 + (turn - 1) * (answer_tokens + 32)


def test_both_ways_ask_the_same_and_take_turns_in_being_first() -> None:
    engines = Engines()
    converse(engines, ROUNDS, 1000)
    pairs = list(zip(engines.asked[::2], engines.asked[1::2], strict=True))
    assert all(one[0] == other[0] and one[1] != other[1] for one, other in pairs)
    firsts = [first[1] for first, _ in pairs]
    assert firsts.count(True) == firsts.count(False)


def test_where_reading_pays() -> None:
    """Reading takes as long as 100 tokens, so it pays for answers of 128, and always where all would be computed."""
    found = converse(Engines(), ROUNDS, 1000)
    assert pays_from(found, has_prompt=True) == 128
    assert pays_from(found, has_prompt=False) == ANSWER_TOKENS[0]
    text = shown(bidirectional_table("toys", found))
    assert "the prompt before: to read pays from answers of 128 tokens on" in text
    assert "min_remote_tokens: 128" in text


def test_it_never_pays() -> None:
    found = converse(Engines(reading_s=10.0), ROUNDS, 1000)
    assert pays_from(found, has_prompt=True) is None
    text = shown(bidirectional_table("toys", found))
    assert "the prompt before: to compute answers of up to 512 tokens is as fast as to read them" in text
    assert "min_remote_tokens" not in text


def test_a_longer_answer_for_which_it_does_not_pay_ends_the_threshold() -> None:
    found = converse(Engines(), ROUNDS, 1000)
    case = Case(has_prompt=True, answer_tokens=256, turn=3)
    for turn in (2, 3):
        slow = case._replace(turn=turn)
        found[slow] = [one._replace(both_ways_s=9.0) for one in found[slow]]
    assert pays_from(found, has_prompt=True) == 512


class TestCommand:
    @pytest.fixture(autouse=True)
    def engines(self, monkeypatch: pytest.MonkeyPatch) -> list[BaseException | Engines]:
        """Return the engines, or the error at their start, of each model in turn."""
        waiting: list[BaseException | Engines] = [Engines(), Engines()]

        @contextmanager
        def started(_shape: LlamaShape, _folder: Path) -> Iterator[Engines]:
            engines = waiting.pop(0)
            if not isinstance(engines, Engines):
                raise engines
            yield engines

        monkeypatch.setattr(bidirectional, "_started", started)
        monkeypatch.setattr(bidirectional, "require_vllm", lambda: None)
        return waiting

    def run(self, *words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["bench", "--bidirectional", "--rounds", str(ROUNDS), *words])
        return result.exit_code, result.output

    def test_tables(self) -> None:
        code, output = self.run()
        assert code == 0
        assert output.count("to read pays from answers of 128 tokens on") == len(bidirectional.MODELS)

    def test_json(self) -> None:
        code, output = self.run("--json")
        assert code == 0
        tree = json.loads(output)["bidirectional"]
        assert tree.keys() == bidirectional.MODELS.keys()
        assert all(len(case["samples"]) == ROUNDS for cases in tree.values() for case in cases)

    def test_an_engine_that_does_not_start(self, engines: list[BaseException | Engines]) -> None:
        engines[0] = ServerFailedError("vLLM ended while starting")
        code, output = self.run()
        assert code != 0
        assert "vLLM ended while starting" in output

    def test_interrupted_shows_what_was_measured(self, engines: list[BaseException | Engines]) -> None:
        engines[1] = Interruption()
        code, output = self.run()
        assert code == INTERRUPTED
        assert output.count("to read pays from") == 2


def shown(table: object) -> str:
    console = Console(width=200, record=True)
    console.print(table)
    return console.export_text()
