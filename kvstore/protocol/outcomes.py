"""Numbers of outcomes in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.model.chunks import Outcome
from kvstore.model.errors import ProtocolError

_OUTCOMES: Final = tuple(Outcome)  # an outcome's number is its index here
_NUMBERS: Final = {outcome: number for number, outcome in enumerate(_OUTCOMES)}


def pack_outcomes(outcomes: Sequence[Outcome]) -> bytes:
    """Pack outcomes as bytes, one each."""
    return bytes([_NUMBERS[outcome] for outcome in outcomes])


def outcome_of(number: int) -> Outcome:
    """Return the outcome with a number, the reverse of ``number_of``.

    Raises:
        ProtocolError: no outcome has this number.
    """
    if not 0 <= number < len(_OUTCOMES):
        raise ProtocolError(f"no outcome has the number {number}")
    return _OUTCOMES[number]


def number_of(outcome: Outcome) -> int:
    """Return the number of an outcome."""
    return _NUMBERS[outcome]
