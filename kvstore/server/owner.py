"""Owner of an embedded server: the engine whose KV alone the server takes, and the engines that send it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from kvstore.model.heads import LAYOUT_FIELD, Part
from kvstore.model.keys import EPOCH_FIELD, Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.payload import Geometry
from kvstore.protocol.progress import Progress

logger = logging.getLogger(__name__)

_MAX_SENDERS: Final = 1024  # senders whose progress is known
_MAX_OPEN: Final = 1 << 16  # their hand-overs in total, open or lost


class Owner:
    """The owner's namespace, parts and senders. Belongs to the thread that decides.

    Args:
        namespace: the namespace of the owner's chunks.
        layout: the geometry of these chunks.
        hold_s: longest time for which chunks from other engines are held until they are read; 0 for no hold.
        parts: parts of these chunks at engines of other tensor-parallel sizes, whose workers are admitted too.

    Attributes:
        senders: progress of the hand-overs to the server.
    """

    def __init__(self, namespace: Namespace, layout: KVLayout, hold_s: float = 0.0, parts: Iterable[Part] = ()) -> None:
        self.namespace = namespace
        self.hold_s = hold_s
        self.senders = Senders()
        self._geometry = Geometry.of(layout)
        self._parts = [(part, Geometry.of(part.layout)) for part in parts]
        self._throttle = Throttle(logger)

    def owns(self, namespace: Namespace) -> bool:
        """Tell if the chunks of a namespace are the owner's, or parts of the owner's."""
        return any(namespace.id == known.id for known, _ in self._welcome())

    def num_readers(self, namespace: Namespace) -> int:
        """Return the number of the owner's workers that read the chunks of a namespace."""
        parts = (part for part, _ in self._parts if part.namespace(self.namespace).id == namespace.id)
        return next((part.num_readers for part in parts), 1)

    def objection(self, hello: messages.Hello) -> str:
        """Return the reason to refuse a client, which names the fields in which its KV differs; empty if it is welcome.

        The owner's own processes, which connect through its private folder, may be an epoch ahead or behind.
        """
        differing = min((_differing(hello, *welcome) for welcome in self._welcome()), key=len)
        if not differing:
            return ""
        known = differing & {*self.namespace.fields, EPOCH_FIELD, LAYOUT_FIELD}
        names = ", ".join([*sorted(known), *(["fields not known here"] if differing - known else [])])
        # The throttle's key does not contain the fields, because strangers choose them.
        self._throttle.log("stranger", "refused an engine with incompatible KV: it differs in %s", names)
        return f"it belongs to an engine with incompatible KV: they differ in {names}"

    def _welcome(self) -> Iterator[tuple[Namespace, Geometry]]:
        yield self.namespace, self._geometry
        for part, geometry in self._parts:
            yield part.namespace(self.namespace), geometry


def _differing(hello: messages.Hello, namespace: Namespace, geometry: Geometry) -> set[str]:
    differing = set(namespace.differing_fields(Namespace(dict(hello.fields))))
    if hello.token:
        differing.discard(EPOCH_FIELD)
    if hello.geometry != geometry:
        differing.add(LAYOUT_FIELD)
    return differing


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
