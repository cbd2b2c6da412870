"""What the demonstration asks a running vLLM for: a streamed completion, and counters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvstore.tools.processes import wait_until

REQUEST_TIMEOUT_S = 300.0
COUNT_TIMEOUT_S = 30.0
TOKENS_LOADED = "vllm:external_prefix_cache_hits_total"
"""vLLM's own count of the prompt tokens that a connector loaded."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt, and how long its first token took."""

    text: str
    ttft_s: float


def stream(url: str, request: Mapping[str, object]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Ask for a greedy completion as a stream; yields each event, and the seconds until it came.

    Raises:
        httpx.HTTPError: the server did not answer, or refused the request.
    """
    with httpx.Client(base_url=url, trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
        yield from events(client, request)


def events(
    client: httpx.Client, request: Mapping[str, object], headers: Mapping[str, str] | None = None
) -> Iterator[tuple[float, dict[str, Any]]]:
    """The same through a client of the caller's.

    Raises:
        httpx.HTTPError: the server did not answer, or refused the request.
    """
    body = {**request, "temperature": 0, "ignore_eos": True, "stream": True}
    begin_s = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.is_error:
            response.read()  # so that callers can show what it says
        for line in response.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter() - begin_s, json.loads(line.removeprefix("data: "))


def complete(url: str, model: str, prompt: str, *, output_tokens: int) -> Completion:
    """Send a prompt, greedily, and measure the time to the first token.

    Raises:
        httpx.HTTPError: the server did not answer, or refused the request.
    """
    request = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "skip_special_tokens": False}
    pieces: list[str] = []
    first_s = 0.0
    for seconds, event in stream(url, request):
        choices = event.get("choices", [])
        if not choices:
            raise httpx.RemoteProtocolError(f"vLLM answered {json.dumps(event)[:500]}")
        first_s = first_s or seconds
        pieces.append(choices[0]["text"])
    return Completion("".join(pieces), first_s)


def read_counter(url: str, name: str, labels: Mapping[str, str] | None = None) -> int:
    """The sum of a Prometheus counter over all its labels, or only where they match; 0 if there is no such counter."""
    wanted = (labels or {}).items()
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        text = client.get(f"{url}/metrics").raise_for_status().text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items()))


class Work:
    """What a vLLM computes of prompts, from now on; for callers whose requests are the only ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._asked_tokens, self._cached_tokens = self._read()

    def of(self, *prompts: Sequence[int]) -> int:
        """The tokens computed of prompts that have just been answered; vLLM counts a little later.

        Raises:
            TimeoutError: it was asked for more, or for less.
        """
        prompt_tokens = sum(map(len, prompts))
        asked_tokens, cached_tokens = self._asked_tokens + prompt_tokens, self._cached_tokens
        if not wait_until(lambda: self._read()[0] == asked_tokens, COUNT_TIMEOUT_S, every_s=0.01):
            raise TimeoutError(f"vLLM has not counted {asked_tokens} tokens of prompts within {COUNT_TIMEOUT_S:.0f} s")
        self._asked_tokens, self._cached_tokens = self._read()
        return prompt_tokens - (self._cached_tokens - cached_tokens)

    def _read(self) -> tuple[int, int]:
        """The tokens of prompts so far, and those of them that were not computed."""
        asked, cached = (read_counter(self._url, f"vllm:prompt_tokens{name}_total") for name in ("", "_cached"))
        return asked, cached
