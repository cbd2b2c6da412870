"""The engine that owns an embedded server, which takes only KV that this engine can use."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.keys import EPOCH_FIELD, Namespace
from kvstore.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.geometry import Geometry
from kvstore.protocol.progress import Progress
from kvstore.throttle import Throttle

logger = logging.getLogger(__name__)

_MAX_SENDERS: Final = 1024  # that the owner is told of, and their hand-overs
_MAX_OPEN: Final = 1 << 16
_LAYOUT: Final = "layout"  # also the name of the namespace's field


class Owner:
    """Belongs to the thread that decides, but for ``senders``.

    Args:
        namespace: of the owner's chunks.
        layout: their geometry.
        hold_s: how long chunks that others have sent stay at most until they are read; 0 as long as there is room.

    Attributes:
        senders: what is on its way, by the senders' names. Another object whenever it changes, for any thread.
    """

    def __init__(self, namespace: Namespace, layout: KVLayout, hold_s: float = 0.0) -> None:
        self.namespace = namespace
        self.hold_s = hold_s
        self.senders: Mapping[str, Progress] = {}
        self._geometry = Geometry.of(layout)
        self._throttle = Throttle(logger)

    def note_progress(self, told: Iterable[Progress]) -> None:
        """Take in what the connected senders say; one that has two connections has said it in either."""
        senders: dict[str, Progress] = {}
        num_open = 0
        for progress in told:
            num_open += len(progress.open)
            if len(senders) >= _MAX_SENDERS or num_open > _MAX_OPEN:
                break  # what the others send is not waited for
            known = senders.get(progress.sender, progress)
            following = max(known.following, progress.following)
            senders[progress.sender] = Progress(progress.sender, following, {**known.open, **progress.open})
        self.senders = senders

    def objection(self, hello: messages.Hello) -> str:
        """Why a client is refused: the names of the fields in which its KV differs; empty if it is welcome.

        The owner's own processes, which connect through its private folder, may be an epoch ahead or behind.
        """
        differing = set(self.namespace.differing_fields(Namespace(dict(hello.fields))))
        if hello.token:
            differing.discard(EPOCH_FIELD)
        if hello.geometry != self._geometry:
            differing.add(_LAYOUT)
        if not differing:
            return ""
        known = differing & {*self.namespace.fields, EPOCH_FIELD, _LAYOUT}
        names = ", ".join([*sorted(known), *(["fields not known here"] if differing - known else [])])
        # The cause does not contain the fields, which strangers choose.
        self._throttle.log("stranger", "refused an engine whose KV cannot be used here: it differs in %s", names)
        return f"it belongs to an engine with other KV: they differ in {names}"
