"""Calls to the servers that hold the chunks, about one chunk, or about many in one round trip to each server.

Other calls read and renew the epoch of a namespace, and delete the keys of former epochs.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard, TypeVar

from redis.exceptions import ResponseError

from kvstore.model.errors import TierError, TierSetupError
from kvstore.tiers.redis.chunk import first_error
from kvstore.tiers.redis.connection import RedisConnection, Reply, pack
from kvstore.tiers.redis.names import Home
from kvstore.tiers.redis.nodes import Node, Nodes, SlotMovedError, SlotMovingError, translated
from kvstore.tiers.redis.url import Deployment, RedisTarget

Result = TypeVar("Result")
Question = tuple[bytes, list[bytes]]
"""Hash tag that decides on the server, and packed commands."""

_PAGE_KEYS = 1000
_EPOCH_DIGITS = 16
_MOVES = 3  # of a slot in a cluster, within one call
_OUTAGES = (TierError, TierSetupError)  # but not errors that concern one chunk


class Calls:
    """Sender of commands, which follows slots to other nodes and finds the servers again after a failure. Thread-safe.

    Every method may raise ``TierError``.
    """

    def __init__(self, target: RedisTarget, nodes: Nodes) -> None:
        self._target = target
        self.nodes = nodes

    def at(self, tag: bytes, action: Callable[[RedisConnection], Result]) -> Result:
        """Run an action at the server that has a tag, even if the tag has just moved to another server.

        Raises:
            TierError: that server failed.
        """
        for _ in range(_MOVES):
            node = self.nodes.node_of(tag)
            try:
                with node.connection() as connection:
                    return action(connection)
            except SlotMovedError as moved:
                self.nodes.forget()
                if self._target.kind is not Deployment.CLUSTER:
                    raise TierSetupError(f"{moved}: use redis-cluster:// in the URL") from moved
            except SlotMovingError:
                raise
            except TierError:
                self.nodes.forget(node)
                raise
        raise TierError(f"the Redis cluster at {self._target} redirects a chunk from node to node")

    def ask_all(self, questions: Sequence[Question]) -> list[Reply | TierError]:
        """Send commands to the servers that have their tags, in one round trip to each server.

        Returns:
            For each question the reply to its last command, or the error of any of them.

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
                for number, reply in zip(numbers, replies, strict=True):
                    answers[number] = reply
            waiting = [number for number in waiting if isinstance(answers[number], SlotMovedError)]
            if not waiting:
                break
            self.nodes.forget()
        failure = next((answer for answer in answers if isinstance(answer, TierError)), None)
        if failure is not None and all(type(answer) in _OUTAGES for answer in answers):
            raise failure
        return answers

    def ask_node(self, node: Node, questions: Sequence[list[bytes]]) -> list[Reply | TierError]:
        """Send commands to one server like ``ask_all``; if it fails as a whole, every answer is its error."""
        try:
            with node.connection() as connection:
                replies = iter(connection.ask([command for commands in questions for command in commands]))
        except TierError as error:
            self.nodes.forget(node)
            return [error for _ in questions]
        return [_answer([next(replies) for _ in commands], node) for commands in questions]

    def pages(self, pattern: bytes) -> Iterator[tuple[Node, list[bytes]]]:
        """Yield all keys that match a pattern, in pages; no connection is held between pages.

        Raises:
            TierError: a server failed.
        """
        for node in self.nodes.masters():
            cursor = b"0"
            while True:
                with node.connection() as connection:
                    cursor, keys = _page(connection.call("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE_KEYS))
                yield node, keys
                if cursor == b"0":
                    break

    def epoch(self, home: Home) -> bytes:
        """Return the current epoch of the namespace of ``home``."""
        return self.at(home.epoch_tag, lambda connection: _epoch(connection, home))

    def renew(self, home: Home) -> Home:
        """Begin a new epoch, in which the namespace's earlier chunks are unreachable."""
        new = Home(home.namespace_id, _new_epoch())
        self.at(new.epoch_tag, lambda connection: connection.call("SET", new.epoch_key, new.epoch))
        return new

    def sweep(self, home: Home) -> None:
        """Delete all keys of the namespace's former epochs.

        The current epoch is read after the keys were listed. Epochs are never reused, so keys of another one are dead.
        """
        for node, keys in self.pages(home.pattern):
            if all(home.parse(key) for key in keys):
                continue
            now = Home(home.namespace_id, self.epoch(home))
            dead = [key for key in keys if now.parse(key) is None]
            with node.connection() as connection:
                connection.ask([pack("UNLINK", key) for key in dead])


def _answer(replies: list[Reply], node: Node) -> Reply | TierError:
    """Return the last reply to a group of commands, or the error of any of them."""
    failure = first_error(replies)
    return replies[-1] if failure is None else translated(failure, node.place)


def _new_epoch() -> bytes:
    return secrets.token_hex(_EPOCH_DIGITS // 2).encode()


def _epoch(connection: RedisConnection, home: Home) -> bytes:
    """Return the current epoch. If there is none, because none began or it was evicted, begin a new one."""
    found = connection.ask([pack("GET", home.epoch_key)])[0]
    if found is None:
        connection.call("SET", home.epoch_key, _new_epoch(), "NX")
        found = connection.call("GET", home.epoch_key)
    if isinstance(found, ResponseError) and not str(found).startswith("WRONGTYPE"):
        raise found
    if not _is_epoch(found):  # another client wrote something else there
        connection.call("SET", home.epoch_key, _new_epoch())
        found = connection.call("GET", home.epoch_key)
    if not _is_epoch(found):  # or every look would find another one
        raise ResponseError("the server does not keep the epoch that it was sent")
    return found


def _is_epoch(found: Reply) -> TypeGuard[bytes]:
    return isinstance(found, bytes) and len(found) == _EPOCH_DIGITS


def _page(reply: Reply) -> tuple[bytes, list[bytes]]:
    """Parse the cursor and the keys of an answer to SCAN.

    Raises:
        ResponseError: it has another form.
    """
    if isinstance(reply, list) and len(reply) == 2:
        cursor, keys = reply
        if isinstance(cursor, bytes) and cursor.isdigit() and isinstance(keys, list):
            return cursor, [key for key in keys if isinstance(key, bytes)]
    raise ResponseError("a malformed answer to SCAN")
