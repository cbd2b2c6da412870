"""The engine that owns an embedded server, which takes only KV that this engine can use."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from kvstore.heads import LAYOUT_FIELD, Part
from kvstore.keys import EPOCH_FIELD, Namespace
from kvstore.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.geometry import Geometry
from kvstore.server.senders import Senders
from kvstore.throttle import Throttle

logger = logging.getLogger(__name__)


class Owner:
    """Belongs to the thread that decides.

    Args:
        namespace: of the owner's chunks.
        layout: their geometry.
        hold_s: how long chunks that others have sent stay at most until they are read; 0 as long as there is room.
        parts: of these chunks at engines of other tensor-parallel sizes: their workers are let in, too.

    Attributes:
        senders: what is on its way.
    """

    def __init__(self, namespace: Namespace, layout: KVLayout, hold_s: float = 0.0, parts: Iterable[Part] = ()) -> None:
        self.namespace = namespace
        self.hold_s = hold_s
        self.senders = Senders()
        self._geometry = Geometry.of(layout)
        self._parts = [(part, Geometry.of(part.layout)) for part in parts]
        self._throttle = Throttle(logger)

    def owns(self, namespace: Namespace) -> bool:
        """Whether chunks of a namespace are the owner's, or parts of them."""
        return any(namespace.id == known.id for known, _ in self._welcome())

    def num_readers(self, namespace: Namespace) -> int:
        """How many of the owner's workers read chunks of a namespace."""
        parts = (part for part, _ in self._parts if part.namespace(self.namespace).id == namespace.id)
        return next((part.num_readers for part in parts), 1)

    def objection(self, hello: messages.Hello) -> str:
        """Why a client is refused: the names of the fields in which its KV differs; empty if it is welcome.

        The owner's own processes, which connect through its private folder, may be an epoch ahead or behind.
        """
        differing = min((_differing(hello, *welcome) for welcome in self._welcome()), key=len)
        if not differing:
            return ""
        known = differing & {*self.namespace.fields, EPOCH_FIELD, LAYOUT_FIELD}
        names = ", ".join([*sorted(known), *(["fields not known here"] if differing - known else [])])
        # The cause does not contain the fields, which strangers choose.
        self._throttle.log("stranger", "refused an engine whose KV cannot be used here: it differs in %s", names)
        return f"it belongs to an engine with other KV: they differ in {names}"

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
