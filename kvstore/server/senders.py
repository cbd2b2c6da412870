"""Progress of hand-overs to this server, as the connected engines report it: one merged view of each engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import chain
from typing import Final

from kvstore.protocol.progress import Progress

_MAX_SENDERS: Final = 1024  # senders whose progress is known
_MAX_OPEN: Final = 1 << 16  # their hand-overs in total, open or lost


class Senders:
    """All senders. Belongs to the thread that decides, except for ``view``.

    Attributes:
        view: progress by the senders' names, for any thread. Each change makes a new object.
    """

    def __init__(self) -> None:
        self.view: Mapping[str, Progress] = {}
        self._told: dict[str, dict[Hashable, Progress]] = {}  # reports by sender and connection
        self._num_open = 0

    def note(self, connection: Hashable, before: Progress | None, now: Progress | None) -> None:
        """Replace a connection's report ``before`` with ``now``; None stands for no report.

        A report beyond the bounds is ignored, and its hand-overs are not waited for.
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
    """Merge the reports of a sender's connections, perhaps of several ranks: a chunk that one lacks is lost for all.

    A hand-over is over once all connections have reported its end.
    """
    if len(told) == 1:
        return told[0]
    ends: dict[int, int] = {}
    for number, end_tokens in chain.from_iterable((*said.open.items(), *said.lost.items()) for said in told):
        ends[number] = min(end_tokens, ends.get(number, end_tokens))
    open_ = {number: ends[number] for said in told for number in said.open}
    lost = {number: end_tokens for number, end_tokens in ends.items() if number not in open_}
    return Progress(sender, min(said.following for said in told), open_, lost)
