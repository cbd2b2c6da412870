"""Owner of an embedded server: the engine whose KV alone the server takes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from kvstore.model.heads import LAYOUT_FIELD, Part
from kvstore.model.keys import EPOCH_FIELD, Namespace
from kvstore.model.layout import KVLayout
from kvstore.model.throttle import Throttle
from kvstore.protocol import messages
from kvstore.protocol.payload import Geometry
from kvstore.server.senders import Senders

logger = logging.getLogger(__name__)


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
