"""What the demonstration asks of a running vLLM: a streamed completion and its counters."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

REQUEST_TIMEOUT_S = 300.0
TOKENS_LOADED = "vllm:external_prefix_cache_hits_total"
"""vLLM's own count of the prompt tokens that a connector supplied."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt, and how long its first token took."""

    text: str
    ttft_s: float


def complete(url: str, model: str, prompt: str, *, output_tokens: int) -> Completion:
    """Send a prompt, greedily, and measure the time to the first token.

    Raises:
        httpx.HTTPError: the server did not answer, or refused the request.
    """
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
    }
    pieces: list[str] = []
    first_s = 0.0
    with httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
        begin = time.perf_counter()
        with client.stream("POST", f"{url}/v1/completions", json=request) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: ")).get("choices", [])
                if not choices:
                    raise httpx.RemoteProtocolError(f"vLLM answered {line[:500]}", request=response.request)
                if not pieces:
                    first_s = time.perf_counter() - begin
                pieces.append(choices[0]["text"])
    return Completion("".join(pieces), first_s)


def read_counter(url: str, name: str, labels: Mapping[str, str] | None = None) -> int:
    """The sum of a Prometheus counter over its labels, or where they are these; 0 if the server does not have it."""
    wanted = (labels or {}).items()
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        text = client.get(f"{url}/metrics").raise_for_status().text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items()))
