"""A vLLM engine in a separate process that runs alongside others and carries out orders.

Orders are lines of JSON on its standard input, answers are marked lines of JSON on its standard output:

    {"rounds": 3, "prompts": [[1, 2], ...]}   each round from vLLM's own cache emptied; an answer after each round
    {"hits": [[1, 2], ...]}                   rounds until all answers come from the store
    {"idle": true}                            asserts that nothing of ours is under way
    {"close": true}                           ends; answers how many pools of cache servers were mapped, and still are
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import Any, Self

from support.cache_server import mapped_pools
from support.forked import VLLM, forker
from support.vllm_engine import Completion, Engine, Prompt, StoreSetup, hits_again, prepare_environment

_MARK = "LIVE ENGINE "


class LiveEngine:
    """The other end of it: a context manager. Several engines may get orders before any has answered."""

    def __init__(self, model: Path, store: StoreSetup, log: Path, *, core: int) -> None:
        setup = json.dumps({"model": str(model), "store": vars(store) | {"disk": None}})
        self._log = log
        with log.open("wb") as said:
            self._process = forker(VLLM).start(
                ["support.live_engine", setup], stdin=PIPE, stdout=PIPE, stderr=said, text=True, cores=[core]
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def order(self, **what: Any) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the next answer."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        raise AssertionError(f"the engine ended:\n{self._log.read_text(errors='replace')[-8000:]}")

    def completions(self) -> list[Completion]:
        """Wait for the next answer, which is that of a round."""
        return [Completion(*completion) for completion in self.answer()]


def main() -> None:
    """Carry out the orders on standard input."""
    setup = json.loads(sys.argv[1])
    prepare_environment(two_processes=False)
    store = StoreSetup(**setup["store"])
    mapped = 0
    with Engine(Path(setup["model"]), store) as engine:
        for line in sys.stdin:
            order = json.loads(line)
            if "close" in order:
                mapped = mapped_pools()
                break
            _obey(engine, order)
    _say([mapped, mapped_pools()])


def _obey(engine: Engine, order: dict[str, Any]) -> None:
    if "idle" in order:
        engine.assert_idle()
        _say(engine.moved.chunks_loaded_from_remote)
    elif "hits" in order:
        _say(hits_again(engine, order["hits"]))
    else:
        prompts: list[Prompt] = order["prompts"]
        for _ in range(order["rounds"]):
            engine.forget_local()
            _say(engine.generate(prompts))


def _say(what: Any) -> None:
    print(_MARK + json.dumps(what), flush=True)
