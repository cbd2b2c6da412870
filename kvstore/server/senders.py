"""What the connected engines say of the KV that is on its way here: one merged view of each, kept as they say more."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import chain
from typing import Final

from kvstore.protocol.progress import Progress

_MAX_SENDERS: Final = 1024  # of which is known what they send, and their hand-overs
_MAX_OPEN: Final = 1 << 16


class Senders:
    """Belongs to the thread that decides, but for ``view``.

    Attributes:
        view: what is on its way, by the senders' names. Another object whenever it changes, for any thread.
    """

    def __init__(self) -> None:
        self.view: Mapping[str, Progress] = {}
        self._told: dict[str, dict[Hashable, Progress]] = {}  # by the sender, and the connection over which it says so
        self._num_open = 0

    def note(self, connection: Hashable, before: Progress | None, now: Progress | None) -> None:
        """Take in what one says, and what it said ``before``; None for nothing.

        What is too much is not taken in: nobody waits for it.
        """
        if before is not None:
            self._forget(connection, before.sender)
        if now is not None and self._has_room(now):
            self._told.setdefault(now.sender, {})[connection] = now
            self._num_open += _size(now)
        view = dict(self.view)
        for sender in {said.sender for said in (before, now) if said is not None}:
            told = self._told.get(sender)
            if told:
                view[sender] = _merged(sender, list(told.values()))
            else:
                view.pop(sender, None)
        self.view = view

    def _has_room(self, now: Progress) -> bool:
        is_known = now.sender in self._told
        return (is_known or len(self._told) < _MAX_SENDERS) and self._num_open + _size(now) <= _MAX_OPEN

    def _forget(self, connection: Hashable, sender: str) -> None:
        told = self._told.get(sender, {})
        said = told.pop(connection, None)
        if said is not None:
            self._num_open -= _size(said)
        if not told:
            self._told.pop(sender, None)


def _size(progress: Progress) -> int:
    return len(progress.open) + len(progress.lost)


def _merged(sender: str, told: list[Progress]) -> Progress:
    """What a sender with several connections says, perhaps of several ranks: what one lacks is of no use from others.

    A hand-over is over once all have said so.
    """
    if len(told) == 1:
        return told[0]
    ends: dict[int, int] = {}
    for number, end_tokens in chain.from_iterable((*said.open.items(), *said.lost.items()) for said in told):
        ends[number] = min(end_tokens, ends.get(number, end_tokens))
    open_ = {number: ends[number] for said in told for number in said.open}
    lost = {number: end_tokens for number, end_tokens in ends.items() if number not in open_}
    return Progress(sender, min(said.following for said in told), open_, lost)
