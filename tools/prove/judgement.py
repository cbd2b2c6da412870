"""Verdicts on the situations of a proof: what is wrong, what is missing, and how much vLLM differs from itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.tools.probe.reasons import why_missed
from kvstore.tools.prove.outputs import (
    LARGEST_TOLERANCE,
    Difference,
    NoOutput,
    Output,
    Outputs,
    compare,
    digest_of_tokens,
    tolerance_of,
)
from kvstore.tools.prove.situations import COMPUTED, HITS, OF_KVSTORE, OWN, Measured, Result, Situation, Verdict


@dataclass(frozen=True)
class Reference:
    """Outputs of vLLM without kvstore, and how much it differs from itself.

    Attributes:
        plain: outputs of the plain run.
        own_hit: outputs of vLLM's own hits; None if there were none.
        own: its own difference, by situation.
        repeats: plain runs, its own hits, and a cold run with kvstore repeat themselves bit by bit.
    """

    plain: Outputs
    own_hit: Outputs | None
    own: Mapping[Situation, Difference]
    repeats: bool = False

    @classmethod
    def of(cls, measured: Mapping[Situation, Measured]) -> Reference:
        """Return the reference for the situations of plain vLLM; one that lacks what it needs does not count."""
        plain = measured[Situation.PLAIN].outputs
        usable = [one for one in OWN if one in measured and not any(_lacking(one, measured[one]))]
        own = {one: compare(plain, measured[one].outputs) for one in usable}
        if not {Situation.OWN_HIT, Situation.OWN_HIT_AGAIN} <= own.keys():
            return cls(plain, None, own)
        own_hit = measured[Situation.OWN_HIT].outputs
        repeated = [
            compare(plain, measured[Situation.AGAIN].outputs),
            compare(own_hit, measured[Situation.OWN_HIT_AGAIN].outputs),
            *(compare(plain, measured[one].outputs) for one in (Situation.COLD,) if one in measured),
        ]
        return cls(plain, own_hit, own, all(difference.is_none for difference in repeated))

    def has(self, outputs: Outputs) -> bool:
        """Tell if each output is that of plain vLLM or of its own hit, logprobs included."""
        if self.own_hit is None:
            return False
        every = zip(self.plain, self.own_hit, outputs, strict=True)
        return all(compare([one], [got]).is_none or compare([other], [got]).is_none for one, other, got in every)

    def must_have(self, outputs: Outputs) -> bool:
        """Tell if hits must be vLLM's own bit by bit: it repeats itself, and they end at the same tokens."""
        cached = [
            [one.cached_tokens for one in run if isinstance(one, Output)] for run in (self.own_hit or (), outputs)
        ]
        return self.repeats and cached[0] == cached[1]

    @property
    def depends_on_prompts(self) -> bool:
        """True if plain vLLM's outputs for two prompts differ more than its own for one."""
        first, *others = self.plain
        return not all(compare([first], [other]).is_within(self.tolerance) for other in others)

    @property
    def tolerance(self) -> float:
        """Largest difference of logprobs, and of two best ones that swap, which counts as vLLM's own."""
        return tolerance_of(self.own.values())


def judge(situation: Situation, measured: Measured, reference: Reference) -> Result:
    """Return the result of a situation; what is wrong precedes what is missing."""
    difference = compare(reference.plain, measured.outputs)
    verdict, words = _verdict(situation, measured, reference, difference)
    return Result(
        situation=situation,
        verdict=verdict,
        words=words,
        prompts=len(measured.outputs),
        prompt_tokens=sum(output.prompt_tokens for output in measured.done),
        cached_tokens=measured.cached_tokens,
        difference=difference,
        outputs_sha256=digest_of_tokens(measured.outputs),
        hit_tokens=measured.grown("hit_tokens_total"),
        moved_bytes=measured.grown("moved_bytes_total"),
        lost_chunks=sum(measured.grown("lost_chunks_total").values()),
    )


def worst(results: Sequence[Result]) -> Verdict:
    """Return the verdict of a proof; without a situation of kvstore's nothing is proven."""
    verdicts = [result.verdict for result in results]
    if not any(result.situation in OF_KVSTORE for result in results):
        verdicts.append(Verdict.NOT_PROVEN)
    return max(verdicts, key=list(Verdict).index)


def _verdict(
    situation: Situation, measured: Measured, reference: Reference, difference: Difference
) -> tuple[Verdict, str]:
    missing = [output.why for output in measured.outputs if isinstance(output, NoOutput)]
    lacking = list(_lacking(situation, measured))
    is_same = difference.is_none or reference.has(measured.outputs)
    if situation in OF_KVSTORE and not is_same and not difference.is_within(reference.tolerance):
        return Verdict.DIFFERS, f"differs more than vLLM from itself: {_in_words(difference)}"
    if situation in HITS and not is_same and reference.must_have(measured.outputs):
        return Verdict.DIFFERS, f"vLLM's own hits repeat bit by bit, and these are others: {_in_words(difference)}"
    if measured.remark:
        return Verdict.NOT_PROVEN, measured.remark
    if missing:
        return Verdict.FAILED, f"{len(missing)} of {len(measured.outputs)} requests had no answer: {missing[0]}"
    if lacking:
        return Verdict.NOT_PROVEN, lacking[0]
    if situation is Situation.PLAIN and len(measured.outputs) > 1 and not reference.depends_on_prompts:
        return Verdict.NOT_PROVEN, "vLLM's outputs do not depend on the prompt, so equal ones prove nothing"
    if situation is Situation.PLAIN:
        return Verdict.PROVEN, "the outputs that others are compared with"
    if situation in OWN:
        own = f"vLLM's own difference: {_in_words(difference)}"
        return Verdict.PROVEN, "no difference" if difference.is_none else own
    if not is_same and reference.tolerance > LARGEST_TOLERANCE:
        return Verdict.NOT_PROVEN, "vLLM differs so much from itself that its outputs prove nothing"
    return Verdict.PROVEN, _proven(difference, is_own=not difference.is_none and is_same)


def _proven(difference: Difference, *, is_own: bool) -> str:
    if difference.is_none:
        return "equal, logprobs included"
    if is_own:
        return "equal to vLLM's own hits, logprobs included"
    if not difference.prompts:
        return f"equal tokens; logprobs within vLLM's own difference: {_in_words(difference)}"
    return f"equal within vLLM's own difference: {_in_words(difference)}"


def _in_words(difference: Difference) -> str:
    parted = ""
    if difference.first_token is not None:
        parted = f"{difference.prompts} prompt(s) with other tokens, from token {difference.first_token + 1} on; "
    return f"{parted}logprobs by {difference.logprob:.2g}"


def _lacking(situation: Situation, measured: Measured) -> Iterator[str]:
    """Yield what was not counted, and so is not shown."""
    done, tier = measured.done, str(situation)
    hits = measured.grown("hit_tokens_total")
    moved = measured.grown("moved_bytes_total")
    lost = measured.grown("lost_chunks_total")
    if situation in COMPUTED and measured.cached_tokens:
        yield f"{measured.cached_tokens:,} tokens were found in a cache, where all should be computed"
    if situation is Situation.COLD and not moved.get("memory|store"):
        yield "nothing was stored"
    if situation in {Situation.OWN_HIT, Situation.OWN_HIT_AGAIN} and not all(output.cached_tokens for output in done):
        yield "vLLM's own prefix cache did not have every prompt: is it off?"
    if situation in HITS:
        yield from _lacking_hits(tier, measured, hits, moved)
    if situation is Situation.DAMAGED and not lost:
        yield "no damaged file was read"
    if situation is Situation.KILLED and not moved.get("remote|load"):
        yield "nothing was loaded before the server was killed"


def _lacking_hits(tier: str, measured: Measured, hits: Mapping[str, int], moved: Mapping[str, int]) -> Iterator[str]:
    missed = [number for number, output in enumerate(measured.done, 1) if not output.cached_tokens]
    if missed:
        why, remedy = why_missed(measured.grown("misses_total"))
        yield f"prompt {missed[0]} (of {len(missed)}) was computed: {why}; {remedy}"
    if set(hits) != {tier} or hits[tier] != measured.cached_tokens:
        found = ", ".join(f"{name} {tokens:,}" for name, tokens in hits.items()) or "nothing"
        yield f"{measured.cached_tokens:,} tokens were to come from {tier}; counted: {found}"
    if not moved.get(f"{tier}|load"):
        yield f"no byte was read from {tier}"
    if failed := sum(measured.grown("failed_loads_total").values()):
        yield f"{failed:,} chunks were not loaded as promised, so vLLM computed them"
