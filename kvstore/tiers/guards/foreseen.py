"""Guard against unexpected errors, so that a defect in a tier, or in a library below it, does not end an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

from kvstore.chunks import ChunkRef, Outcome
from kvstore.errors import KVStoreError, TierError
from kvstore.throttle import Throttle
from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.guards.base import TierWrapper

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Answers = TypeVar("Answers", bound=Sized)


class Foreseen(TierWrapper):
    """Wrapper that turns every error that is not kvstore's into a ``TierError``, and logs it at most once a minute.

    An answer for a wrong number of chunks is also turned into a ``TierError``.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._throttle = Throttle(logger)

    def contains(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Forward."""
        return self._complete(refs, super().contains(refs))

    def nearest(self, trails: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Forward."""
        return self._complete(trails, super().nearest(trails))

    def get(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self._complete(transfers, super().get(transfers))

    def get_layers(self, transfers: Sequence[Transfer], layers: range) -> list[Outcome]:
        """Forward."""
        return self._complete(transfers, super().get_layers(transfers, layers))

    def put(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Forward."""
        return self._complete(transfers, super().put(transfers))

    def _complete(self, asked: Sized, answers: Answers) -> Answers:
        if len(answers) != len(asked):
            raise TierError(f"the {self.name} tier answers about {len(answers)} chunks instead of {len(asked)}")
        return answers

    def _call(self, operation: str, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except KVStoreError:
            raise
        except Exception as error:
            kind = type(error).__name__
            self._throttle.log(
                f"{operation} {kind}",
                "a defect: %s of the %s tier raised %s, which counts as a failure of the tier",
                operation,
                self.name,
                kind,
                level=logging.ERROR,
                exc_info=error,
            )
            raise TierError(f"{operation} of the {self.name} tier raised {kind}: {error}") from error
