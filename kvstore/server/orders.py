"""Orders: requests of operators for reports and changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Final

from kvstore.model.chunks import ChunkRef, chunk_of
from kvstore.protocol import messages
from kvstore.protocol.messages import Refusal
from kvstore.server.clients import Client
from kvstore.server.core import Core
from kvstore.server.spaces import Chunk, Space

_MAX_LISTED: Final = 1024  # groups of pins


class Orders:
    """Carries out orders. Belongs to the thread that decides. The caller checks that the sender is an operator.

    The orders of an operator with a tenant reach this tenant's chunks only, as if there were no others.

    Args:
        core: the shared state of the server.
        pin_max_s: longest time for which a chunk may be pinned.
        clear: forgets the chunks of a namespace, and returns their number.
    """

    def __init__(self, core: Core, pin_max_s: float, clear: Callable[[Space], int]) -> None:
        self._core = core
        self._stock = core.stock
        self._pin_max_s = pin_max_s
        self._clear = clear

    def carry_out(self, client: Client, order: messages.Order) -> Generator[None, None, messages.Answer]:
        """Carry out an order of a client, in steps, and report its result."""
        match order:
            case messages.ClearSpaces():
                count = 0
                for cleared in self._spaces(client, order.namespace):
                    count += self._clear(cleared)
                    yield
                return report(order, {"chunks": count})
            case messages.UnpinSpaces():
                wanted = {space.id for space in self._spaces(client, order.namespace)}
                pinned = [chunk for chunk in self._stock.pins if chunk.space.id in wanted]
                return report(order, {"chunks": (yield from self._unpin(pinned))})
            case messages.Pins():
                spaces = {space.id for space in self._spaces(client)}
                return report(order, self._stock.pins.listed(self._core.now(), _MAX_LISTED, spaces))
        space = self._stock.spaces.get(order.space)
        if space is None or not _reaches(client, space):
            return messages.Refused(order.serial, Refusal.UNKNOWN, "there is no such namespace")
        refs = messages.unpack_refs(order.refs)
        if isinstance(order, messages.Explain):
            return report(order, (yield from self._explain(space, refs)))
        if order.is_wanted:
            return report(order, {"chunks": (yield from self._pin(space, refs, order.seconds))})
        pinned = [space.chunks[ref] for ref in refs if ref in space.chunks]
        return report(order, {"chunks": (yield from self._unpin(pinned))})

    def _pin(self, space: Space, refs: Sequence[ChunkRef], seconds: int) -> Generator[None, None, int]:
        end_s = self._core.now() + min(seconds or self._pin_max_s, self._pin_max_s)
        count = 0
        for ref in refs:
            count += self._stock.pins.pin(space, [ref], end_s)
            yield
        return count

    def _unpin(self, chunks: Sequence[Chunk]) -> Generator[None, None, int]:
        count = 0
        for chunk in chunks:
            count += self._stock.pins.unpin([chunk])
            yield
        return count

    def _explain(self, space: Space, refs: Sequence[ChunkRef]) -> Generator[None, None, dict[str, object]]:
        """Say where each chunk is; if all are ends of one chunk's blocks, also name the chunk that holds most."""
        places = []
        for ref in refs:
            places.append(self._stock.why(space, ref))
            yield
        tree: dict[str, object] = {"chunks": places}
        holder = holder_of(space, refs)
        if holder is not None:
            ref, shared_blocks = holder
            tree["nearest"] = [ref.prefix_key.hex(), ref.num_blocks, shared_blocks, self._stock.why(space, ref)]
        return tree

    def _spaces(self, client: Client, namespace_id: bytes = b"") -> list[Space]:
        wanted = [space for space in self._stock.spaces.values() if namespace_id in {b"", space.namespace.id}]
        return [space for space in wanted if _reaches(client, space)]


def _reaches(client: Client, space: Space) -> bool:
    return client.runs_all or client.tenant == space.tenant


def holder_of(space: Space, ends: Sequence[ChunkRef]) -> tuple[ChunkRef, int] | None:
    """Find the chunk that holds most of a chunk's first blocks, given as the tails that end with each block.

    Returns:
        The chunk and the number of shared blocks; None if no chunk shares any, or the tails are not of such a form.
    """
    if [ref.num_blocks for ref in ends] != list(range(1, len(ends) + 1)):
        return None
    trail, shared = next(space.trails.neighbours(b"".join(ref.prefix_key for ref in ends)), (b"", 0))
    return (chunk_of(trail), shared) if shared else None


def report(request: messages.Request, tree: object) -> messages.Report:
    """Return an answer for people, as JSON."""
    return messages.Report(request.serial, json.dumps(tree).encode())
