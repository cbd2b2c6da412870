"""Progress of hand-overs, as a sender reports it to its receivers.

Each hand-over has a number, and later ones have higher numbers. Each report contains the whole state, and not only the
changes, so that nothing must be repeated after a lost connection or a restart of the receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

ALL_TOKENS: Final = 1 << 30
BEAT_S: Final = 1.0  # longest time between two reports of a sender, even if nothing has changed
SILENT_BEATS: Final = 5  # missed reports, after which no receiver waits, as the sender hangs or its host is gone
_NONE: Final[Mapping[int, int]] = {}


class Progress(NamedTuple):
    """Hand-overs of a sender to one receiver. Those with a number below ``following`` that are not open are over.

    Attributes:
        sender: name of the sender; a new one at each start.
        following: the number after the sender's highest so far, for any receiver.
        open: hand-overs under way, with the token of the prompt up to which chunks may still arrive.
        lost: recent hand-overs that ended with missing chunks, with the token at which the first of these begins.
    """

    sender: str
    following: int
    open: Mapping[int, int]
    lost: Mapping[int, int] = _NONE

    def end_tokens(self, handover: int) -> int:
        """Return the token up to which chunks of a hand-over may arrive; 0 if it is over, all before it begins."""
        return self.open.get(handover, 0) if handover < self.following else ALL_TOKENS

    def limit_tokens(self, handover: int) -> int:
        """Return the token from which on chunks of a hand-over have not arrived and never will."""
        return self.open.get(handover, self.lost.get(handover, ALL_TOKENS))
