"""Value of keeping a chunk, from the fate of chunks like it: a survival estimate and its Gittins index.

A chunk's *class* is its number of uses, up to four, and the length of the answer of the request that used it last, once
that has ended; its *age* is the number of chunks touched since then. For every class and age bucket the table counts
uses (events) and chunks that were no longer observed (censored). From these and the chunks still waiting it estimates
the hazard of a use at that age (Kaplan and Meier, 1958). The value of keeping a chunk of age b is the best ratio, over
all times T to hold it, of the chance of a use up to T to the expected time held: the Gittins index of the chunk, in
uses per chunk touched.

Ranking cached objects by hits per space and time from observed ages is LHD's idea (Beckmann, Chen, Cidon, NSDI 2018).
LHD holds an object without a time limit, where this table looks for the best time to give up.

Answers tell if a conversation goes on: an agent's tool call is short and returns within seconds, a long report is often
the last turn. That holds for some workloads only, and chunks of one request share their fate, so few observations look
like many. Therefore hazards by answer are drawn towards those by uses alone, with a weight under which each half of the
requests predicts the other half best.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from functools import partial
from math import log2
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

NUM_USES: Final = 4
NO_ANSWER: Final = 0
NUM_ANSWERS: Final = 7
"""No answer yet, then below 64, 128, 256, 512, 1,024 tokens, and longer ones."""
NUM_CLASSES: Final = NUM_USES * NUM_ANSWERS
NUM_HALVES: Final = 2
_FIRST_AGE, _OCTAVES = 16, 20
EDGES = [round(_FIRST_AGE * 2 ** (step / 2)) for step in range(2 * _OCTAVES)]
"""Ages at which a new bucket begins: two per octave, up to 12 million."""
NUM_BUCKETS = len(EDGES) + 1
_WIDTHS = np.diff([0, *EDGES, 2 * EDGES[-1]])
_PRIOR_WEIGHT = 30.0  # chunks
_ANSWER_WEIGHTS = (30.0, 300.0, 3e3, 3e4, 1e12)  # chunks; the last one leaves answers out
_PRIOR = np.array([1 - 0.97 ** (2 * log2(_FIRST_AGE)), *([0.03] * len(EDGES))])
"""Hazards before any observations: the same for every half octave, so that the oldest is evicted first."""
_DECAY = 0.995  # of past counts, at each update
_WEIGHT_INTERVAL = 8  # updates
_LEAST = 1e-9  # hazard in the logarithms, and time
_IS_LATER = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS), bool))  # by bucket, and by the bucket at whose end to give up

_SHAPE = NUM_HALVES, NUM_USES, NUM_ANSWERS, NUM_BUCKETS

if TYPE_CHECKING:
    Array = npt.NDArray[np.float64]


bucket_of = partial(bisect_right, EDGES)
"""Function that returns the bucket of an age."""


def answer_of(answer_tokens: int) -> int:
    """Return the number of an answer's length."""
    return 1 + min(NUM_ANSWERS - 2, max(0, (answer_tokens // 32).bit_length() - 1))


class SurvivalTable:
    """Counts the fate of chunks of each class, and estimates the value of keeping one.

    Classes are numbered by uses, then by answer. Each request's chunks count in one of two halves.

    Attributes:
        values: by class and age bucket; a chunk used more often is never worth less at the same age and answer.
    """

    def __init__(self) -> None:
        self._hits, self._lost, self._waiting = _Counts(_DECAY), _Counts(_DECAY), _Counts(0.0)
        self._weight = _ANSWER_WEIGHTS[-1]
        self._num_updates = 0
        self.values: list[list[float]] = []
        self.update()

    def hit(self, cls: int, half: int, age: int, count: int = 1) -> None:
        """Count chunks of this class that were used at this age."""
        self._hits.flat[(half * NUM_CLASSES + cls) * NUM_BUCKETS + bucket_of(age)] += count

    def lose(self, cls: int, half: int, age: int, count: int = 1) -> None:
        """Count chunks of this class that are no longer observed."""
        self._lost.flat[(half * NUM_CLASSES + cls) * NUM_BUCKETS + bucket_of(age)] += count

    def wait(self, cls: int, half: int, age: int, count: int = 1) -> None:
        """Count observed chunks of this class that reached this age without a use. Counted anew for each update."""
        self._waiting.flat[(half * NUM_CLASSES + cls) * NUM_BUCKETS + bucket_of(age)] += count

    def update(self) -> None:
        """Recompute the values, and decay past counts."""
        hits, censored = self._hits.take(), self._lost.take() + self._waiting.take()
        if self._num_updates < _WEIGHT_INTERVAL or self._num_updates % _WEIGHT_INTERVAL == 0:
            self._weight = _best_weight(hits, censored)
        self._num_updates += 1
        values = _values(_hazards_by_answer(hits.sum(0), censored.sum(0), self._weight))
        by_uses = np.maximum.accumulate(values, axis=0).tolist()
        self.values = [row for rows in by_uses for row in rows * (NUM_ANSWERS // len(rows))]


class _Counts:
    """Counts that Python adds to one by one, and numpy takes.

    Those since the last update are whole numbers, so that it makes no difference if chunks are counted singly.

    Args:
        share: share of the past counts that stays at each update.

    Attributes:
        flat: counts since the last update, by half, class and bucket.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._past = np.zeros(_SHAPE)
        self.flat = array("d", bytes(self._past.nbytes))
        self._new = np.frombuffer(self.flat).reshape(_SHAPE)  # the same memory

    def take(self) -> Array:
        """Return all counts by half, uses, answer and bucket, and let them become the past."""
        counts = self._past + self._new
        np.multiply(counts, self._share, out=self._past)
        self._new[:] = 0.0
        return counts


def _hazards(hits: Array, censored: Array, prior: Array, weight: float) -> Array:
    """Return the chance of a use in each bucket, if reached; censored chunks saw half of their last bucket."""
    return np.minimum(1.0, (hits + weight * prior) / (_reached(hits, censored) - censored / 2 + weight))


def _reached(hits: Array, censored: Array) -> Array:
    reached: Array = np.cumsum((hits + censored)[..., ::-1], axis=-1)[..., ::-1]
    return reached


def _hazards_by_answer(hits: Array, censored: Array, weight: float) -> Array:
    """Return hazards by uses, answer and bucket; one for all answers where these are left out or unknown."""
    pool = _hazards(hits.sum((0, 1)), censored.sum((0, 1)), _PRIOR, _PRIOR_WEIGHT)
    by_uses = _hazards(hits.sum(1), censored.sum(1), pool, _PRIOR_WEIGHT)[:, np.newaxis]
    if weight == _ANSWER_WEIGHTS[-1]:
        return by_uses
    hazards = _hazards(hits, censored, by_uses, weight)
    hazards[:, :1] = by_uses
    return hazards


def _best_weight(hits: Array, censored: Array) -> float:
    """Return the weight with which the hazards of each half make the other half's fate likeliest."""
    if not hits[:, :, NO_ANSWER + 1 :].any():
        return _ANSWER_WEIGHTS[-1]

    def log_likelihood(weight: float) -> float:
        known = [_hazards_by_answer(hits[half], censored[half], weight) for half in range(NUM_HALVES)]
        hazards = np.clip(np.stack(known[::-1]), _LEAST, 1 - _LEAST)
        return float((hits * np.log(hazards) + passed * np.log1p(-hazards)).sum())

    passed = np.maximum(_reached(hits, censored) - hits - censored / 2, 0.0)
    return max(_ANSWER_WEIGHTS, key=log_likelihood)


def _values(hazards: Array) -> Array:
    """Return the steepest slope from each bucket to a later one, over time held and expected uses."""
    time, uses = np.zeros((2, *hazards.shape[:-1], NUM_BUCKETS + 1))
    uses[..., 1:] = 1 - np.cumprod(1 - hazards, axis=-1)
    time[..., 1:] = np.cumsum((1 - uses[..., :-1]) * (1 - hazards / 2) * _WIDTHS, axis=-1)
    rise = uses[..., np.newaxis, 1:] - uses[..., :-1, np.newaxis]
    run = np.maximum(time[..., np.newaxis, 1:] - time[..., :-1, np.newaxis], _LEAST)
    values: Array = np.where(_IS_LATER, rise / run, 0.0).max(axis=-1)
    return values
