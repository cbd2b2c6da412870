"""Copies between slots and the model's blocks: launched on a device, where a slot is in use until its copy has ended.

On the host they are done when the call returns, and nothing is in use afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kvstore.chunks import ByteArray
from kvstore.errors import DeviceFullError
from kvstore.memory.labelled import LabelledPool
from kvstore.paged.streams import Moment, Streams, Way
from kvstore.throttle import Throttle

logger = logging.getLogger(__name__)


class Launcher:
    """For one thread at a time, whose copies use ``streams``.

    Args:
        cpu: the pool whose slots are copied to and from.
        streams: of the device where the model's blocks are.
        on_failure: told how many chunks were not copied, for want of memory on the device.
    """

    def __init__(self, cpu: LabelledPool, streams: Streams, on_failure: Callable[[int], None]) -> None:
        self._cpu = cpu
        self._streams = streams
        self._on_failure = on_failure
        self._throttle = Throttle(logger)

    def claim(self, slot: int) -> ByteArray:
        """Take a slot to gather a chunk into it, after all that the device still does with it."""
        return self._cpu.claim_on_device(slot, self._streams)

    def launch(self, slots: Sequence[int], way: Way, copy: Callable[[], Sequence[Moment]]) -> Sequence[Moment] | None:
        """Launch copies from or to slots, which the device uses until the moments that ``copy`` returns for them.

        None if the device had no memory left for it.
        """
        moments: list[Moment] = []
        if not self.attempt(slots, way, lambda: moments.extend(copy())):
            return None
        for slot, moment in zip(slots, moments, strict=True):
            self._cpu.note_use(slot, moment)
        return moments

    def attempt(self, slots: Sequence[int], way: Way, copy: Callable[[], object]) -> bool:
        """Launch copies from or to slots, whose use the caller notes. False if the device had no memory left for it.

        Other errors are raised: a device that is broken stays so.
        """
        try:
            copy()
        except BaseException as error:
            self._hold(slots, way)
            if not isinstance(error, DeviceFullError):
                raise
            self._on_failure(len(slots))
            self._throttle.log("memory", "%d chunks are not copied: %s", len(slots), error)
            return False
        return True

    def note_uses(self, slots: Iterable[int], moment: Moment) -> None:
        """The device uses slots until ``moment``."""
        for slot in slots:
            self._cpu.note_use(slot, moment)

    def _hold(self, slots: Sequence[int], way: Way) -> None:
        """Part of what raised may have been launched: slots are in use until all copies this way have ended."""
        self.note_uses(slots, self._streams.launch(way, lambda: None, None))
