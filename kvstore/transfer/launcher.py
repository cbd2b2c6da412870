"""Launches of copies between slots and the model's blocks on a device, where a slot is in use until its copy has ended.

On the host copies are done when the call returns, and no slot is in use afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore.memory.slabs import LabelledPool
from kvstore.model.errors import DeviceFullError
from kvstore.model.throttle import Throttle
from kvstore.paged.streams import DeviceEvent, Direction, Streams

logger = logging.getLogger(__name__)


class Launcher:
    """Launcher of the copies of one thread at a time, which uses ``streams``.

    Args:
        cpu: the pool whose slots are copied to and from.
        streams: of the device that holds the model's blocks.
        on_failure: called with the number of chunks that were not copied for lack of device memory.
    """

    def __init__(self, cpu: LabelledPool, streams: Streams, on_failure: Callable[[int], None]) -> None:
        self._cpu = cpu
        self._streams = streams
        self._on_failure = on_failure
        self._throttle = Throttle(logger)

    def launch(
        self, slots: Sequence[int], direction: Direction, copy: Callable[[], Sequence[DeviceEvent]]
    ) -> Sequence[DeviceEvent] | None:
        """Launch copies from or to slots, which the device uses until the events that ``copy`` returns for them.

        Returns None if the device had no memory left.
        """
        events: list[DeviceEvent] = []
        if not self.attempt(slots, direction, lambda: events.extend(copy())):
            return None
        for slot, event in zip(slots, events, strict=True):
            self._cpu.note_use(slot, event)
        return events

    def attempt(self, slots: Sequence[int], direction: Direction, copy: Callable[[], object]) -> bool:
        """Launch copies from or to slots, whose use the caller notes. False if the device had no memory left.

        Other errors are raised, because a broken device stays broken.
        """
        try:
            copy()
        except BaseException as error:
            self._hold(slots, direction)
            if not isinstance(error, DeviceFullError):
                raise
            self._on_failure(len(slots))
            self._throttle.log("memory", "%d chunks are not copied: %s", len(slots), error)
            return False
        return True

    def note_uses(self, slots: Iterable[int], event: DeviceEvent) -> None:
        """Note that the device uses slots until ``event``."""
        for slot in slots:
            self._cpu.note_use(slot, event)

    def _hold(self, slots: Sequence[int], direction: Direction) -> None:
        """Mark slots as used until all copies of a direction have ended, as a failed launch may have begun some."""
        self.note_uses(slots, self._streams.launch(direction, lambda: None, None))
