"""Conversations of the bench, with a simulated engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from kvstore.model.errors import ConfigError
from kvstore.tools.bench import conversations
from kvstore.tools.bench.conversations import CONTROL, PLAIN, parse_connectors, turns_table


class Engine:
    """Engine that knows the prompts it has had; ``forget`` empties it unless it has a store."""

    def __init__(self, *, stores: bool) -> None:
        self.tasks: list[dict[str, Any]] = []
        self._stores = stores
        self._known: set[tuple[int, ...]] = set()

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        self.tasks.append(task)
        if task.get("forget"):
            self._known = self._known if self._stores else set()
            return {"forgot": True}
        cached = [len(prompt) if tuple(prompt) in self._known else 0 for prompt in task["prompts"]]
        self._known |= {tuple(prompt) for prompt in task["prompts"]}
        return {"seconds": 0.1 if all(cached) else 1.0, "cached_tokens": cached}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_WRITES_S", 0.0)


def test_every_engine_is_asked_the_same_and_the_store_alone_knows_it_again() -> None:
    engines = {PLAIN: Engine(stores=False), "disk": Engine(stores=True), CONTROL: Engine(stores=False)}
    samples = conversations._converse(dict(engines), 3 * conversations.TURNS)
    asked = [engine.tasks for engine in engines.values()]
    assert asked[0] == asked[1] == asked[2]
    for name in (PLAIN, CONTROL):
        assert samples[name].warm_ttft_s == [1.0] * 3 * conversations.TURNS
        assert samples[name].warm_cached_share == [0.0] * 3
    assert samples["disk"].cold_ttft_s == [1.0] * 3 * conversations.TURNS
    assert samples["disk"].warm_ttft_s == [0.1] * 3 * conversations.TURNS
    assert samples["disk"].warm_cached_share == [1.0] * 3
    assert samples["disk"].warm_tokens_per_s == [conversations.TOGETHER * conversations.ANSWER_TOKENS / 0.1] * 3
    console = Console(width=120, record=True)
    console.print(turns_table({"disk": samples}))
    assert "with it" in console.export_text()


def test_a_turn_begins_with_the_one_before() -> None:
    engine = Engine(stores=True)
    conversations._converse({PLAIN: engine}, 1)
    prompts = [task["prompts"][0] for task in engine.tasks[: conversations.TURNS]]
    for shorter, longer in pairwise(prompts):
        assert longer[: len(shorter)] == shorter
        assert len(longer) == len(shorter) + conversations.TURN_TOKENS


def test_connectors_by_name() -> None:
    assert parse_connectors("all") == list(conversations.CONNECTORS)
    assert parse_connectors("disk,example") == ["disk", "example"]
    with pytest.raises(ConfigError, match="not 'tape'"):
        parse_connectors("disk,tape")
