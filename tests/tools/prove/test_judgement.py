"""Verdicts of ``kvstore prove``: every way to be something else than proven."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvstore.tools.probe.counters import PREFIX, Counters
from kvstore.tools.prove.judgement import Reference, judge, worst
from kvstore.tools.prove.outputs import (
    Difference,
    NoOutput,
    Output,
    Outputs,
    compare,
    digest_of_tokens,
    tolerance_of,
)
from kvstore.tools.prove.situations import HITS, OWN, Measured, Result, Situation, Verdict

PLAIN = Output((5, 6, 7), (-0.5, -0.25, -0.125), (1.0, 0.5, 0.25), prompt_tokens=100, cached_tokens=0)
HIT = replace(PLAIN, logprobs=(-0.5, -0.25, -0.126), cached_tokens=96)
BEFORE = Counters({}, 1)


def counted(**grown: int) -> Counters:
    """Return counters; two underscores in a name stand before its labels, one of ``direction`` before that."""
    values: dict[tuple[str, str], float] = {}
    for name, count in grown.items():
        metric, _, label = name.partition("__")
        values[f"{PREFIX}{metric}_total", re.sub("_(load|store)$", r"|\1", label)] = count
    return Counters(values, 1)


def shifted(output: Output, by: float) -> Output:
    return replace(output, logprobs=tuple(value + by for value in output.logprobs))


def other(output: Output, at: int) -> Output:
    return replace(output, tokens=(*output.tokens[:at], 900, *output.tokens[at + 1 :]))


def reference(*, together: float = 0.0, own_hits: Sequence[Output] = (HIT, HIT), cold: Output = PLAIN) -> Reference:
    measured = {
        Situation.PLAIN: Measured([PLAIN]),
        Situation.AGAIN: Measured([PLAIN]),
        Situation.TOGETHER: Measured([shifted(PLAIN, together)]),
        Situation.OWN_HIT: Measured([own_hits[0]]),
        Situation.OWN_HIT_AGAIN: Measured([own_hits[1]]),
        Situation.COLD: Measured([cold]),
    }
    return Reference.of(measured)


def hits(output: Output | NoOutput = HIT, tier: str = "disk", **grown: int) -> Measured:
    tokens = output.cached_tokens if isinstance(output, Output) else 96
    counts = {f"hit_tokens__{tier}": tokens, f"moved_bytes__{tier}_load": 4096} | grown
    return Measured([output], BEFORE, counted(**{name: count for name, count in counts.items() if count}))


def verdict(situation: Situation, measured: Measured, known: Reference | None = None) -> tuple[Verdict, str]:
    result = judge(situation, measured, known or reference())
    return result.verdict, result.words


@pytest.mark.parametrize("situation", HITS)
def test_a_hit_that_is_vllms_own(situation: Situation) -> None:
    found = verdict(situation, hits(tier=str(situation)))
    assert found == (Verdict.PROVEN, "equal to vLLM's own hits, logprobs included")


def test_equal_to_plain_vllm() -> None:
    assert verdict(Situation.DISK, hits(replace(PLAIN, cached_tokens=64))) == (
        Verdict.PROVEN,
        "equal, logprobs included",
    )


def test_each_prompt_may_be_a_hit_or_computed() -> None:
    """After a server was killed, the rest is computed."""
    known = replace(reference(), plain=[PLAIN, PLAIN], own_hit=[HIT, HIT])
    counts = counted(moved_bytes__remote_load=9)
    state, words = verdict(Situation.KILLED, Measured([HIT, PLAIN], BEFORE, counts), known)
    assert (state, words) == (Verdict.PROVEN, "equal to vLLM's own hits, logprobs included")


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (hits(replace(HIT, cached_tokens=0), hit_tokens__disk=0), "prompt 1 (of 1) was computed"),
        (hits(hit_tokens__disk=0, hit_tokens__memory=96), "96 tokens were to come from disk; counted: memory 96"),
        (hits(hit_tokens__disk=64), "96 tokens were to come from disk; counted: disk 64"),
        (hits(hit_tokens__disk=64, hit_tokens__remote=32), "counted: disk 64, remote 32"),
        (hits(moved_bytes__disk_load=0), "no byte was read from disk"),
        (hits(moved_bytes__disk_load=0, moved_bytes__disk_store=9), "no byte was read from disk"),
        (hits(failed_loads=2), "2 chunks were not loaded as promised"),
        (Measured([HIT]), "counted: nothing"),
        (replace(hits(), remark="vLLM did not start"), "vLLM did not start"),
        (replace(hits(NoOutput("vLLM did not start")), remark="why"), "why"),
    ],
)
def test_a_hit_that_was_not_counted_is_not_proven(measured: Measured, words: str) -> None:
    state, said = verdict(Situation.DISK, measured)
    assert (state, words in said) == (Verdict.NOT_PROVEN, True), said


def test_the_reason_of_a_miss_is_named() -> None:
    measured = hits(replace(HIT, cached_tokens=0), hit_tokens__disk=0, misses__tier_down=1)
    assert "a tier does not answer" in verdict(Situation.DISK, measured)[1]


@pytest.mark.parametrize("situation", [Situation.MEMORY, Situation.DISK, Situation.DAMAGED, Situation.COLD])
@pytest.mark.parametrize(
    "wrong",
    [other(HIT, 0), other(HIT, 2), shifted(HIT, 0.01), shifted(HIT, -0.01), shifted(HIT, math.nan), shifted(HIT, 1e9)],
)
def test_other_outputs_differ_whatever_else_is_missing(situation: Situation, wrong: Output) -> None:
    assert verdict(situation, hits(wrong, str(situation)))[0] is Verdict.DIFFERS
    assert verdict(situation, Measured([wrong], remark="vLLM did not end"))[0] is Verdict.DIFFERS


def test_shorter_outputs_differ() -> None:
    short = replace(HIT, tokens=(5, 6), logprobs=(-0.5, -0.25), gaps=(1.0, 0.5))
    assert verdict(Situation.DISK, hits(short))[0] is Verdict.DIFFERS
    assert compare([short], [HIT]).gap == math.inf


def test_a_request_without_an_answer_is_a_failure() -> None:
    state, words = verdict(Situation.DISK, hits(NoOutput("vLLM answered 500")))
    assert (state, words) == (Verdict.FAILED, "1 of 1 requests had no answer: vLLM answered 500")


def test_own_hits_that_repeat_must_be_had_bit_by_bit() -> None:
    """A wrong last bit moves logprobs by less than other batches do."""
    near = shifted(HIT, 1e-5)
    state, words = verdict(Situation.DISK, hits(near), reference(together=0.01))
    assert (state, "and these are others" in words) == (Verdict.DIFFERS, True)
    for known in (
        reference(together=0.01, own_hits=(HIT, shifted(HIT, 1e-6))),
        reference(together=0.01, cold=shifted(PLAIN, 1e-6)),
        reference(together=0.01, own_hits=(replace(HIT, cached_tokens=64),) * 2),
    ):
        state, words = verdict(Situation.DISK, hits(near), known)
        assert (state, "within vLLM's own difference" in words) == (Verdict.PROVEN, True), words
    damaged = Measured([near], BEFORE, counted(lost_chunks=1))
    assert verdict(Situation.DAMAGED, damaged, reference(together=0.01))[0] is Verdict.PROVEN, "it ends elsewhere"


def test_tokens_may_part_where_vllm_itself_wavers() -> None:
    """The difference of logprobs, and of two that swap, is at most twice vLLM's own."""
    parted = other(replace(HIT, cached_tokens=64), 2)
    for own, expected in ((0.0, Verdict.DIFFERS), (0.124, Verdict.DIFFERS), (0.126, Verdict.PROVEN)):
        assert verdict(Situation.DISK, hits(parted), reference(together=own))[0] is expected
    _, words = verdict(Situation.DISK, hits(parted), reference(together=0.2))
    assert words.startswith("equal within vLLM's own difference: 1 prompt(s) with other tokens, from token 3 on")


def test_a_vllm_that_differs_very_much_from_itself_proves_nothing() -> None:
    near = shifted(replace(HIT, cached_tokens=64), 0.01)
    assert verdict(Situation.DISK, hits(near), reference(together=0.4))[0] is Verdict.PROVEN
    assert verdict(Situation.DISK, hits(near), reference(together=0.6))[0] is Verdict.NOT_PROVEN
    assert verdict(Situation.DISK, hits(HIT), reference(together=0.6))[0] is Verdict.PROVEN, "equal all the same"


@pytest.mark.parametrize("situation", [Situation.PLAIN, Situation.AGAIN, Situation.TOGETHER, Situation.COLD])
def test_a_run_that_was_to_compute_and_found_something(situation: Situation) -> None:
    found = Measured([replace(PLAIN, cached_tokens=32)], BEFORE, counted(moved_bytes__memory_store=9))
    assert verdict(situation, found)[0] is Verdict.NOT_PROVEN
    computed = replace(found, outputs=[PLAIN])
    assert verdict(situation, computed)[0] is Verdict.PROVEN


def test_other_evidence() -> None:
    assert verdict(Situation.COLD, Measured([PLAIN], BEFORE, BEFORE)) == (Verdict.NOT_PROVEN, "nothing was stored")
    assert verdict(Situation.DAMAGED, Measured([PLAIN], BEFORE, BEFORE))[0] is Verdict.NOT_PROVEN
    assert verdict(Situation.DAMAGED, Measured([PLAIN], BEFORE, counted(lost_chunks=1)))[0] is Verdict.PROVEN
    assert verdict(Situation.KILLED, Measured([PLAIN], BEFORE, BEFORE))[0] is Verdict.NOT_PROVEN
    assert verdict(Situation.OWN_HIT, Measured([PLAIN]))[0] is Verdict.NOT_PROVEN


def test_outputs_that_do_not_depend_on_the_prompt_prove_nothing() -> None:
    def state(*outputs: Output) -> Verdict:
        return verdict(Situation.PLAIN, Measured(outputs), replace(reference(), plain=outputs))[0]

    assert state(PLAIN, PLAIN, shifted(PLAIN, 1e-5)) is Verdict.NOT_PROVEN
    assert state(PLAIN, PLAIN, other(PLAIN, 0)) is Verdict.PROVEN
    assert state(PLAIN, shifted(PLAIN, 0.1)) is Verdict.PROVEN
    assert state(PLAIN) is Verdict.PROVEN, "of one prompt nothing is known"


def test_what_lacks_its_evidence_is_no_reference() -> None:
    """Neither a plain run with hits nor own hits without any widens the tolerance."""
    measured = {one: Measured([shifted(PLAIN, 0.3)]) for one in OWN}
    measured[Situation.PLAIN] = Measured([PLAIN])
    measured[Situation.TOGETHER] = Measured([shifted(replace(PLAIN, cached_tokens=1), 0.4)])
    known = Reference.of(measured)
    assert set(known.own) == {Situation.AGAIN}
    assert (known.own_hit, known.repeats) == (None, False)
    assert known.tolerance == pytest.approx(0.6)


def test_differences() -> None:
    both: Outputs = [PLAIN, PLAIN]
    assert compare(both, both) == Difference()
    assert compare(both, [other(PLAIN, 2), other(PLAIN, 1)]) == Difference(2, 1, 0.0, 0.5)
    assert compare(both, [PLAIN, shifted(PLAIN, 0.5)]) == Difference(0, None, 0.5, 0.0)
    late = replace(PLAIN, logprobs=(-0.5, -0.25, -9.0))
    assert compare([other(PLAIN, 1)], [late]).logprob == 0.0, "logprobs after another token say nothing"
    assert compare([replace(PLAIN, gaps=(math.nan,) * 3)], [other(PLAIN, 0)]).gap == math.inf
    assert compare([PLAIN], [NoOutput("")]) == Difference()
    assert tolerance_of([]) == 1e-4
    assert tolerance_of([Difference(1, 0, 0.1, 0.5)]) == 0.5
    assert digest_of_tokens([PLAIN]) == digest_of_tokens([HIT]) != digest_of_tokens([other(PLAIN, 0)])


def test_the_worst_verdict_counts() -> None:
    def result(state: Verdict, situation: Situation = Situation.DISK) -> Result:
        return replace(judge(situation, hits(), reference()), verdict=state, situation=situation)

    order = list(Verdict)
    assert order == ["proven", "not proven", "failed", "differs"]
    for place, state in enumerate(order):
        assert worst([result(one) for one in order[: place + 1]]) is state
    assert worst([result(Verdict.PROVEN, Situation.AGAIN)]) is Verdict.NOT_PROVEN, "kvstore was not tried"
