"""What people ask of a server, or tell it to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from kvstore.protocol import messages
from kvstore.protocol.messages import Refusal
from kvstore.server.freight import Ways
from kvstore.server.spaces import Space
from kvstore.server.stock import Stock

_MAX_LISTED: Final = 1024  # pins that end together


class Orders:
    """Belongs to the thread that decides. Whether who asks may do so is for the caller to know.

    Args:
        stock: what is where.
        ways: to the outside.
        pin_max_s: how long a pin lasts at most.
        clear: forgets the chunks of a namespace, and says how many there were.
    """

    def __init__(self, stock: Stock, ways: Ways, pin_max_s: float, clear: Callable[[Space], int]) -> None:
        self._stock = stock
        self._ways = ways
        self._pin_max_s = pin_max_s
        self._clear = clear

    def carry_out(self, order: messages.Order) -> messages.Answer:
        """Do it, and say what came of it."""
        match order:
            case messages.ClearSpaces():
                return report(order, {"chunks": sum(map(self._clear, self._spaces(order.space)))})
            case messages.UnpinSpaces():
                pinned = [chunk for chunk in self._stock.pins if order.space in {b"", chunk.space.id}]
                return report(order, {"chunks": self._stock.unpin(pinned)})
            case messages.Pins():
                return report(order, self._pins())
        space = self._stock.spaces.get(order.space)
        if space is None:
            return messages.Refused(order.serial, Refusal.UNKNOWN, "there is no such namespace")
        refs = messages.unpack_refs(order.refs)
        if isinstance(order, messages.Explain):
            return report(order, {"chunks": [self._stock.why(space, ref) for ref in refs]})
        if order.is_wanted:
            seconds = min(order.seconds or self._pin_max_s, self._pin_max_s)
            count = self._stock.pin(space, refs, self._ways.now() + seconds)
        else:
            count = self._stock.unpin([space.chunks[ref] for ref in refs if ref in space.chunks])
        return report(order, {"chunks": count})

    def _spaces(self, space_id: bytes) -> list[Space]:
        return [space for space in self._stock.spaces.values() if not space_id or space.id == space_id]

    def _pins(self) -> dict[str, object]:
        now_s = self._ways.now()
        views = self._stock.pins.views()
        listed = [
            {"namespace": v.space_id, "chunks": v.chunks, "bytes": v.bytes, "ends_in_s": max(0, round(v.end_s - now_s))}
            for v in views[:_MAX_LISTED]
        ]
        return {"pins": listed, "left_out": len(views) - len(listed)}


def report(request: messages.Request, tree: object) -> messages.Report:
    """An answer for people."""
    return messages.Report(request.serial, json.dumps(tree).encode())
