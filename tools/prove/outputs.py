"""Greedy outputs with their logprobs, and the difference between two runs of the same prompts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

SMALLEST_TOLERANCE: Final = 1e-4
"""Difference of logprobs that float32 shows in other batches; two best logprobs closer than this may swap."""
LARGEST_TOLERANCE: Final = 1.0
"""Difference beyond which outputs prove nothing: KV of another prompt differs by about as much."""
_TIMES: Final = 2.0  # of vLLM's own difference, which is the largest of a few samples


@dataclass(frozen=True)
class Output:
    """Output for one prompt.

    Attributes:
        tokens: token ids.
        logprobs: the logprob of each token.
        gaps: distance of each token's two best logprobs.
        prompt_tokens: length of the prompt.
        cached_tokens: tokens of the prompt that were not computed.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class NoOutput:
    """Request that ended without its output, and the reason, which quotes nothing of the prompt."""

    why: str


Outputs = Sequence[Output | NoOutput]


@dataclass(frozen=True)
class Difference:
    """Difference between two runs of the same prompts.

    Attributes:
        prompts: prompts with other tokens.
        first_token: lowest position of another token; None if all are the same.
        logprob: largest difference of the logprobs of a prompt's tokens up to its first other one.
        gap: largest distance of the two best logprobs where another token stands.
    """

    prompts: int = 0
    first_token: int | None = None
    logprob: float = 0.0
    gap: float = 0.0

    @property
    def is_none(self) -> bool:
        """True if all tokens and logprobs are the same."""
        return self == Difference()

    def is_within(self, tolerance: float) -> bool:
        """Tell if logprobs differ by no more, and tokens only where vLLM's choice hangs on no more."""
        return self.logprob <= tolerance and self.gap <= tolerance


def compare(expected: Outputs, got: Outputs) -> Difference:
    """Compare runs of the same prompts; prompts without an output in either are left out."""
    prompts, first_token, logprob, gap = 0, None, 0.0, 0.0
    for one, other in zip(expected, got, strict=True):
        if isinstance(one, NoOutput) or isinstance(other, NoOutput):
            continue
        same = _same_tokens(one.tokens, other.tokens)
        pairs = list(zip(one.logprobs[:same], other.logprobs[:same], strict=True))
        logprob = max([logprob, *(_distance(*pair) for pair in pairs)])
        if same < max(len(one.tokens), len(other.tokens)):
            prompts += 1
            first_token = same if first_token is None else min(first_token, same)
            gap = max(gap, _distance(one.gaps[same], 0.0) if same < len(one.gaps) else math.inf)
    return Difference(prompts, first_token, logprob, gap)


def tolerance_of(own: Iterable[Difference]) -> float:
    """Return the tolerance for a vLLM that differs from itself like this."""
    differences = list(own)
    logprobs = [_TIMES * difference.logprob for difference in differences]
    return max([SMALLEST_TOLERANCE, *logprobs, *(difference.gap for difference in differences)])


def digest(value: object) -> str:
    """Return the SHA-256 of a value's JSON, as hex digits; equal values have equal digests."""
    return hashlib.sha256(canonical(value)).hexdigest()


def canonical(value: object) -> bytes:
    """Return a value as JSON that is the same everywhere: sorted keys, no spaces, no NaN.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of_tokens(outputs: Outputs) -> str:
    """Return the digest of the token ids of all outputs."""
    return digest([list(output.tokens) if isinstance(output, Output) else None for output in outputs])


def _same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _distance(one: float, other: float) -> float:
    """Return the distance of two numbers; infinite where one is NaN, with which any comparison is false."""
    distance = abs(one - other)
    return distance if math.isfinite(distance) else math.inf
