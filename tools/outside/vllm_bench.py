"""Loads of ``vllm bench serve``, which comes with vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.tools.outside import traces
from kvstore.tools.outside.generator import MODEL_NAME, SEED, Numbers, Place, UnreadableError
from kvstore.tools.vllmserver import find_vllm

RESULT: Final = "bench.json"
_PREFIXES: Final = 8
_REPEATS: Final = 15
_PREFIX_TOKENS: Final = 2016
_SUFFIX_TOKENS: Final = 32
_OUTPUT_TOKENS: Final = 4
_TRACE: Final = "timed.jsonl"


class _VllmBench:
    """Part that both loads share."""

    def variables(self, place: Place) -> Mapping[str, str]:  # noqa: ARG002 - as the protocol has it
        """Return the seed of Python's ``hash``, from which ``timed_trace`` takes its tokens."""
        return {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def read(self, out: Path) -> Numbers:
        """Return the results in ``out``.

        Raises:
            UnreadableError: there are none.
        """
        try:
            found = json.loads((out / RESULT).read_text(encoding="utf-8"))
            return Numbers(
                found["p50_ttft_ms"] / 1e3,
                found["p99_ttft_ms"] / 1e3,
                found["request_throughput"],
                found["completed"],
                found["failed"],
                {"output tokens/s": found["output_throughput"]},
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UnreadableError(f"vllm bench serve left no {RESULT} that can be read: {error!r}") from error

    def _command(self, place: Place, url: str, out: Path, prompts: int, *more: str) -> Sequence[str]:
        return [
            *(str(find_vllm()), "bench", "serve", "--backend", "openai", "--base-url", url),
            *("--model", MODEL_NAME, "--tokenizer", str(place.model), "--seed", str(SEED)),
            *("--num-prompts", str(prompts), "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
            *("--metric-percentiles", "50,99", "--save-result", "--result-dir", str(out), "--result-filename", RESULT),
            *more,
        ]


class PrefixRepetition(_VllmBench):
    """Long prefixes that come again with new ends, one request at a time: 92% of all tokens are a prefix seen before.

    vLLM's own cache holds one or two of the prefixes.
    """

    name: Final = "vllm-bench-prefix"
    about: Final = (
        f"vllm bench serve, prefix_repetition: {_PREFIXES} prefixes of {_PREFIX_TOKENS:,} tokens, "
        f"{_REPEATS} times each, {_SUFFIX_TOKENS} tokens behind, one request at a time"
    )

    def prepare(self, place: Place) -> None:
        """Do nothing."""

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        """Return the command line."""
        dataset = [
            *("--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", str(_PREFIXES)),
            *("--prefix-repetition-prefix-len", str(_PREFIX_TOKENS)),
            *("--prefix-repetition-suffix-len", str(_SUFFIX_TOKENS)),
            *("--prefix-repetition-output-len", str(_OUTPUT_TOKENS)),
        ]
        return self._command(*(place, url, out, _PREFIXES * place.scaled(_REPEATS)), *dataset, "--max-concurrency", "1")


class TimedTrace(_VllmBench):
    """Chats of Mooncake's public trace, shrunk, in recorded order, at even intervals that suffice plain vLLM."""

    name: Final = "vllm-bench-trace"
    about: Final = "vllm bench serve, timed_trace: chats of Mooncake's conversation trace, an eighth as long, in order"

    def prepare(self, place: Place) -> None:
        """Convert the trace.

        Raises:
            SkippedError: it is not there.
        """
        file = place.trace("github.com/kvcache-ai/Mooncake, FAST25-release", "conversation_trace.jsonl")
        traces.shrink_mooncake(file, place.runs / _TRACE, chats=place.scaled(traces.CHATS))

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        """Return the command line."""
        file = place.runs / _TRACE
        prompts = len(file.read_text(encoding="utf-8").splitlines())
        dataset = [
            *("--dataset-name", "timed_trace", "--dataset-path", str(file), "--timed-trace-sec-multiplier", "0.001"),
            *("--timed-trace-chunk-hash-size", str(traces.BLOCK_TOKENS)),
            *("--timed-trace-label-timestamp", "timestamp", "--timed-trace-label-input-length", "input_length"),
            *("--timed-trace-label-output-length", "output_length", "--timed-trace-label-hash-ids", "hash_ids"),
        ]
        return self._command(place, url, out, prompts, *dataset)
