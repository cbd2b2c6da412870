"""HTTP client of a running vLLM, for every tool that asks one: streamed completions, and counters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvstore.tools.processes import wait_until

REQUEST_TIMEOUT_S = 300.0
COUNT_TIMEOUT_S = 30.0
_METRICS_TIMEOUT_S = 10.0
TOKENS_LOADED = "vllm:external_prefix_cache_hits_total"
"""vLLM's counter of the prompt tokens that a connector loaded."""


@dataclass(frozen=True)
class Completion:
    """Answer to one prompt, and the seconds to its first token."""

    text: str
    ttft_s: float


def client_of(url: str, timeout_s: float, *, api_key: str | None = None) -> httpx.Client:
    """Return a client of the server at ``url``, which heeds no proxy of the environment."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, trust_env=False)


def stream(url: str, request: Mapping[str, object]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Request a greedy completion as a stream, and yield the seconds until each event, and the event.

    Raises:
        httpx.HTTPError: the server did not answer, or refused the request.
    """
    with client_of(url, REQUEST_TIMEOUT_S) as client:
        yield from events(client, request)


def events(
    client: httpx.Client, request: Mapping[str, object], headers: Mapping[str, str] | None = None
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Do the same as ``stream`` with the caller's client.

    Raises:
        httpx.HTTPError: the server did not answer, or refused the request.
    """
    body = {**request, "temperature": 0, "ignore_eos": True, "stream": True}
    begin_s = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.is_error:
            response.read()  # so that callers can show the error's text
        for line in response.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter() - begin_s, json.loads(line.removeprefix("data: "))


def complete(url: str, model: str, prompt: str, *, output_tokens: int) -> Completion:
    """Request a greedy completion of a prompt, and measure the time to its first token.

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
    """Return the sum of a Prometheus counter over all samples, or those with ``labels``; 0 if there are none."""
    wanted = (labels or {}).items()
    with client_of(url, _METRICS_TIMEOUT_S) as client:
        samples = samples_of(client.get("/metrics"))
        return int(sum(sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items()))


def samples_of(answer: httpx.Response) -> Iterator[Sample]:
    """Yield the samples in an answer of ``/metrics``.

    Raises:
        httpx.HTTPStatusError: the server refused the request.
        ValueError: the answer is not in the format of metrics.
    """
    for family in text_string_to_metric_families(answer.raise_for_status().text):
        yield from family.samples


class Work:
    """Counter of the prompt tokens that a vLLM computes, for callers that send all of its requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._asked_tokens, self._cached_tokens = self._read()

    def of(self, *prompts: Sequence[int]) -> int:
        """Return the computed tokens of prompts that have just been answered, after waiting for vLLM's counters.

        Raises:
            TimeoutError: vLLM counted more or fewer prompt tokens.
        """
        prompt_tokens = sum(map(len, prompts))
        asked_tokens, cached_tokens = self._asked_tokens + prompt_tokens, self._cached_tokens
        if not wait_until(lambda: self._read()[0] == asked_tokens, COUNT_TIMEOUT_S, every_s=0.01):
            raise TimeoutError(f"vLLM has not counted {asked_tokens} tokens of prompts within {COUNT_TIMEOUT_S:.0f} s")
        self._asked_tokens, self._cached_tokens = self._read()
        return prompt_tokens - (self._cached_tokens - cached_tokens)

    def _read(self) -> tuple[int, int]:
        """Return the prompt tokens so far, and how many of them were cached."""
        asked, cached = (read_counter(self._url, f"vllm:prompt_tokens{name}_total") for name in ("", "_cached"))
        return asked, cached
