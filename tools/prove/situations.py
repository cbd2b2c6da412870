"""Situations of a proof, what must have been counted in each, and their verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvstore.tools.probe.counters import Counters, grown_by_label
from kvstore.tools.prove.outputs import (
    Difference,
    Output,
    Outputs,
)


class Situation(StrEnum):
    """Situations in order; the first five are vLLM's without kvstore."""

    PLAIN = "plain"
    AGAIN = "plain-again"
    TOGETHER = "plain-together"
    OWN_HIT = "own-hit"
    OWN_HIT_AGAIN = "own-hit-again"
    COLD = "cold"
    MEMORY = "memory"
    DISK = "disk"
    DAMAGED = "damaged-disk"
    REMOTE = "remote"
    KILLED = "killed-server"


ABOUT: Final[Mapping[Situation, str]] = {
    Situation.PLAIN: "vLLM without kvstore computes every prompt, one at a time",
    Situation.AGAIN: "the same once more, in the opposite order",
    Situation.TOGETHER: "the same once more, all prompts at once: other batches",
    Situation.OWN_HIT: "vLLM's own prefix cache has every prompt",
    Situation.OWN_HIT_AGAIN: "the same once more",
    Situation.COLD: "kvstore has nothing, and stores",
    Situation.MEMORY: "every prompt comes from memory, in the process that stored it",
    Situation.DISK: "vLLM was started again, and only the disk has the prompts",
    Situation.DAMAGED: "of three files on the disk one is cut, and one has a flipped bit",
    Situation.REMOTE: "vLLM was started again, and only the remote tier has the prompts",
    Situation.KILLED: "a remote server is killed while vLLM answers",
}
OWN: Final = (Situation.AGAIN, Situation.TOGETHER, Situation.OWN_HIT, Situation.OWN_HIT_AGAIN)
"""Situations that show how much vLLM differs from itself."""
COMPUTED: Final = (Situation.PLAIN, Situation.AGAIN, Situation.TOGETHER, Situation.COLD)
HITS: Final = (Situation.MEMORY, Situation.DISK, Situation.REMOTE)
OF_KVSTORE: Final = tuple(Situation)[5:]


class Verdict(StrEnum):
    """Verdicts of a situation, and of a whole proof, from the best to the worst."""

    PROVEN = "proven"
    NOT_PROVEN = "not proven"
    FAILED = "failed"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Measured:
    """Outputs of a situation, and the growth of kvstore's counters.

    Attributes:
        outputs: one for each prompt.
        before: counters before the first request; None without kvstore.
        after: counters after the last one.
        remark: why the situation did not come about; empty if it did.
    """

    outputs: Outputs
    before: Counters | None = None
    after: Counters | None = None
    remark: str = ""

    def grown(self, name: str) -> dict[str, int]:
        """Return the growth of one of kvstore's counters by label, without labels that did not grow."""
        if self.before is None or self.after is None:
            return {}
        return grown_by_label(self.before.by_label(name), self.after.by_label(name))

    @property
    def done(self) -> list[Output]:
        """Outputs of the requests that had one."""
        return [output for output in self.outputs if isinstance(output, Output)]

    @property
    def cached_tokens(self) -> int:
        """Tokens of all prompts that were not computed."""
        return sum(output.cached_tokens for output in self.done)


@dataclass(frozen=True)
class Result:
    """Result of a situation, as the certificate has it.

    Attributes:
        difference: from plain vLLM's outputs.
        words: the difference, or what is missing, in words.
    """

    situation: Situation
    verdict: Verdict
    words: str
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    difference: Difference
    outputs_sha256: str
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    lost_chunks: int = 0
