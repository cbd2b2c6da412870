"""Prompts that clients have pinned, whose chunks a lease keeps from eviction."""

from __future__ import annotations

from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.index.index import ChunkIndex
from kvstore.model.keys import PrefixHasher


class PromptPins:
    """Pinned prompts of one engine. For the scheduler's thread.

    A pin begins when the steps that store its chunks have ended, of its request and of others with the same prompt.

    Args:
        index: of all chunks.
        steps: tells which steps have ended.
        max_s: the duration of a pin.
    """

    def __init__(self, index: ChunkIndex, steps: StepTracker, max_s: float) -> None:
        self._index = index
        self._steps = steps
        self._max_s = max_s
        self._coming: dict[str, tuple[PrefixHasher, int]] = {}  # with the last step to wait for

    def add(self, name: str, hasher: PrefixHasher, last_step: int) -> None:
        """Pin the chunks of a request that has just ended, once ``last_step`` is over."""
        self._coming[name] = (hasher, last_step)
        self.hold()

    def hold(self) -> None:
        """Begin the pins whose steps have ended."""
        for name, (hasher, last_step) in list(self._coming.items()):
            if self._steps.is_over(last_step):
                self._lease(name, hasher)
                del self._coming[name]

    def _lease(self, name: str, hasher: PrefixHasher) -> None:
        """Hold the known chunks of a prompt with the checkpoint behind them, without which they may be of no use.

        If there is no room for all, hold those up to an earlier checkpoint for which there is.
        """
        match = self._index.lookup(hasher)
        while True:
            refs = (*match.checkpoint, *match.refs)
            num_held = self._index.lease(name, refs, self._max_s)
            if num_held == len(refs) or not match.checkpoint:
                return
            num_chunks = max(0, num_held - len(match.checkpoint))
            limit_tokens = min(match.num_tokens - 1, num_chunks * hasher.chunk_tokens)
            match = self._index.lookup(hasher, limit_tokens=limit_tokens)

    def end(self, name: str) -> None:
        """End a pin, also one that has yet to begin."""
        self._coming.pop(name, None)
        self._index.release(name)

    def end_all(self) -> int:
        """End all pins, and return how many there were."""
        names = {*self._coming, *(view.name for view in self._index.lease_views())}
        for name in names:
            self.end(name)
        return len(names)

    def cancel_coming(self) -> None:
        """Forget the pins that have yet to begin."""
        self._coming.clear()
