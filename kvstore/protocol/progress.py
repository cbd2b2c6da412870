"""How far the hand-overs of a sender are, as its receivers are told.

Each hand-over has a number, later ones a higher one. A receiver is told the whole state each time, and not what has
changed, so that a connection that was lost, or a receiver that was restarted, leaves nothing to be made up for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

ALL_TOKENS: Final = 1 << 30
BEAT_S: Final = 1.0  # how often a sender says it at least, although nothing has changed
SILENT_BEATS: Final = 5  # missed, after which nobody waits for it: it hangs, or its host is gone
_NONE: Final[Mapping[int, int]] = {}


class Progress(NamedTuple):
    """What a sender hands over to one receiver. What is below ``following`` and not open is over.

    Attributes:
        sender: its name; another one each time it starts.
        following: the number after the highest so far, whoever receives it.
        open: for each number under way, up to which token of the prompt chunks may still come.
        lost: of the last ones that are over, those that lack chunks, with the token at which the first of them begins.
    """

    sender: str
    following: int
    open: Mapping[int, int]
    lost: Mapping[int, int] = _NONE

    def end_tokens(self, handover: int) -> int:
        """Up to which token chunks of a hand-over may still come; 0 if it is over."""
        return self.open.get(handover, 0) if handover < self.following else ALL_TOKENS

    def limit_tokens(self, handover: int) -> int:
        """The token from which on chunks of a hand-over neither have come nor will."""
        return self.open.get(handover, self.lost.get(handover, ALL_TOKENS))
