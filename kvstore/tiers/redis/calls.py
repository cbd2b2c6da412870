"""Questions to the servers that have the answers: about one chunk, or about many in one round trip a server."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

from kvstore.errors import TierError, TierSetupError
from kvstore.tiers.redis.chunk import first_error
from kvstore.tiers.redis.nodes import Node, Nodes, SlotMovedError, SlotMovingError, translated
from kvstore.tiers.redis.url import Kind, RedisTarget
from kvstore.tiers.redis.wire import Link, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = TypeVar("Result")
Question = tuple[bytes, list[bytes]]
"""The hash tag that decides on the server, and packed commands."""

_MOVES = 3  # of a slot in a cluster, within one call
_OUTAGES = (TierError, TierSetupError)  # but not what concerns a chunk


class Calls:
    """Asks servers, follows slots to other nodes, and has the servers found anew after a failure. Thread-safe."""

    def __init__(self, target: RedisTarget, nodes: Nodes) -> None:
        self._target = target
        self.nodes = nodes

    def at(self, tag: bytes, action: Callable[[Link], Result]) -> Result:
        """Do something at the server that has a tag; if the tag has moved to another one, there.

        Raises:
            TierError: that server failed.
        """
        for _ in range(_MOVES):
            node = self.nodes.node_of(tag)
            try:
                with node.link() as link:
                    return action(link)
            except SlotMovedError as moved:
                self.nodes.forget()
                if self._target.kind is not Kind.CLUSTER:
                    raise TierSetupError(f"{moved}: use redis-cluster:// in the URL") from moved
            except SlotMovingError:
                raise
            except TierError:
                self.nodes.forget(node)
                raise
        raise TierError(f"the Redis cluster at {self._target} sends a chunk from node to node")

    def ask_all(self, questions: Sequence[Question]) -> list[Reply | TierError]:
        """Put commands to the servers that have their tags, all for one server in one round trip.

        Returns:
            For each question the reply to its last command, or what was wrong with any.

        Raises:
            TierError: no server gave any answer.
        """
        answers: list[Reply | TierError] = [None] * len(questions)
        waiting: Sequence[int] = range(len(questions))
        for _ in range(_MOVES):
            by_node: dict[Node, list[int]] = defaultdict(list)
            for number in waiting:
                by_node[self.nodes.node_of(questions[number][0])].append(number)
            for node, numbers in by_node.items():
                replies = self.ask_node(node, [questions[number][1] for number in numbers])
                answers = replaced(answers, dict(zip(numbers, replies, strict=True)))
            waiting = [number for number in waiting if isinstance(answers[number], SlotMovedError)]
            if not waiting:
                break
            self.nodes.forget()
        failure = next((answer for answer in answers if isinstance(answer, TierError)), None)
        if failure is not None and all(type(answer) in _OUTAGES for answer in answers):
            raise failure
        return answers

    def ask_node(self, node: Node, questions: Sequence[list[bytes]]) -> list[Reply | TierError]:
        """The same for one server; none of the answers is anything else if it fails as a whole."""
        try:
            with node.link() as link:
                replies = iter(link.ask([command for commands in questions for command in commands]))
        except TierError as error:
            self.nodes.forget(node)
            return [error for _ in questions]
        return [_answer([next(replies) for _ in commands], node) for commands in questions]


def _answer(replies: list[Reply], node: Node) -> Reply | TierError:
    """The last reply to a group of commands, or what was wrong with any of them."""
    failure = first_error(replies)
    return replies[-1] if failure is None else translated(failure, node.place)


def replaced(answers: list[Reply | TierError], by_number: dict[int, Reply | TierError]) -> list[Reply | TierError]:
    """The answers, but with others for some of the numbers."""
    return [by_number.get(number, answer) for number, answer in enumerate(answers)]
