"""One vLLM of a proof: its process, the requests it gets, and what it counts meanwhile."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx

from kvstore.adapters.vllm.flag import TRANSFER_FLAG
from kvstore.config.sources import FILE_VARIABLES
from kvstore.tools.probe.counters import Counters
from kvstore.tools.probe.settling import let_it_store, nudge
from kvstore.tools.processes import free_port
from kvstore.tools.prove.outputs import NoOutput, Output, Outputs
from kvstore.tools.prove.prompts import OUTPUT_TOKENS, Content
from kvstore.tools.prove.settings import Settings
from kvstore.tools.prove.situations import Measured
from kvstore.tools.vllmclient import client_of, events
from kvstore.tools.vllmserver import DRAIN_TIMEOUT_S, STOP_TIMEOUT_S, ServerFailedError, VllmProcess, find_vllm

_DRAIN_FLAG: Final = "--shutdown-timeout"
_MOST_AT_ONCE: Final = 64
_MOST_LOOKS: Final = 10_000
_REPORTED_S: Final = 10.0  # longest wait for workers' reports of loads
_TYPES: Final = ("dtype", "kv_cache_dtype", "quantization")
_SAID: Final = re.compile(rf"\b({'|'.join(_TYPES)})=(?:torch\.)?'?(\w+)")

Salts = Sequence[str]


class ProvingVllm(VllmProcess):
    """Process of one vLLM.

    Args:
        settings: the user's flags.
        log: file for vLLM's output.
        changes: changed keys of kvstore; None for vLLM without it.
        environment: variables added to this process's.
        timeout_s: longest wait for its start, and for each answer.
    """

    def __init__(
        self,
        settings: Settings,
        log: Path,
        changes: Mapping[str, object] | None,
        timeout_s: float,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log, self.port = log, free_port()
        self.drains = changes is not None
        self.start_timeout_s = self.timeout_s = timeout_s
        self.stop_timeout_s = STOP_TIMEOUT_S + settings.flags.given.get(_DRAIN_FLAG, DRAIN_TIMEOUT_S)
        self.settings, self.changes, self._environment = settings, changes, environment

    def command(self) -> list[str]:
        """Return the command line."""
        words = [str(find_vllm()), "serve", *self.settings.words, "--host", "127.0.0.1", "--port", str(self.port)]
        words.append("--enable-prompt-tokens-details")
        if self.changes is not None:
            words += [TRANSFER_FLAG, json.dumps(self.settings.transfer_with(self.changes))]
        if _DRAIN_FLAG not in self.settings.flags.given:
            words += [_DRAIN_FLAG, str(DRAIN_TIMEOUT_S)]
        return words

    def variables(self) -> dict[str, str]:
        """Return its environment: without a key for its API, and with a log that names the model's types."""
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        if self.settings.file is not None:
            inherited[FILE_VARIABLES[0]] = str(self.settings.file.absolute())
        return {**inherited, "VLLM_LOGGING_LEVEL": "INFO", **self._environment}

    @property
    def types(self) -> dict[str, str]:
        """The model's types by name, as vLLM's log has them."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        line = next((line for line in text.splitlines() if "kv_cache_dtype=" in line), "")
        return dict(_SAID.findall(line))

    @contextmanager
    def ended_if_broken(self) -> Iterator[None]:
        """Kill vLLM if the block is left by an exception, as the threads that it answers would be waited for."""
        with ExitStack() as undo:
            assert self._process is not None
            undo.callback(self._kill_group, self._process)
            yield
            undo.pop_all()


class Session:
    """Requests to a running vLLM, and what it counts meanwhile.

    Args:
        vllm: the process.
        client: its client.

    Raises:
        ServerFailedError: it does not say which model it serves.
    """

    def __init__(self, vllm: ProvingVllm, client: httpx.Client) -> None:
        self.vllm, self._client = vllm, client
        # Each replica has its own memory; prompts go to the first one.
        self._headers = {"X-data-parallel-rank": "0"} if vllm.settings.flags.workers.replicas > 1 else {}
        try:
            served = client.get("/v1/models").raise_for_status().json()["data"][0]
            self._model: str = served["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ServerFailedError("vLLM does not say which model it serves", vllm.log) from error
        self.max_model_tokens: int | None = served.get("max_model_len")

    def one_by_one(
        self, prompts: Sequence[Content], salts: Salts, name: str | None = None, *, begin: int = 0
    ) -> Outputs:
        """Ask for one output after the other; ``name``, and numbers from ``begin`` on, name them in kvstore's keys."""
        return [
            self.ask(prompt, salt, None if name is None else f"{name}-{number}")
            for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True), begin)
        ]

    def together(self, prompts: Sequence[Content], salts: Salts) -> Outputs:
        """Ask for all outputs at once."""
        with (
            ThreadPoolExecutor(min(len(prompts), _MOST_AT_ONCE), "kvstore-prove") as askers,
            self.vllm.ended_if_broken(),
        ):
            return list(askers.map(self.ask, prompts, salts))

    def ask(self, prompt: Content, salt: str, name: str | None = None) -> Output | NoOutput:
        """Ask for an output; vLLM's own cache has the salt in its keys, and kvstore the name in its place."""
        request: dict[str, object] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "logprobs": 2,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        if name is not None:
            request["kv_transfer_params"] = {"kvstore.probe": name}
        try:
            return _output_of([event for _, event in events(self._client, request, self._headers)])
        except httpx.HTTPStatusError as error:
            return NoOutput(f"vLLM answered {error.response.status_code}")
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            return NoOutput(f"vLLM's answer broke off, or is none of a completion ({type(error).__name__})")

    def measure(self, asking: Callable[[], Outputs], *, stores: bool = False) -> Measured:
        """Ask, and return the outputs and the counters before and after; ``stores`` waits until all is written."""
        if self.vllm.changes is None:
            return Measured(asking())
        before = self._counters(0.0)
        outputs = asking()
        return Measured(outputs, before, self._counters(self.vllm.timeout_s if stores else _REPORTED_S))

    def _counters(self, most_s: float) -> Counters | None:
        """Return the counters, once all is written, or the time has passed; None if vLLM has ended."""
        with suppress(httpx.HTTPError, ValueError):
            return let_it_store(self._client, self._model, self._headers, most_nudges=_MOST_LOOKS, most_s=most_s)
        return None

    def forget(self) -> bool:
        """Remove all that this engine has stored, on every tier; return False if vLLM does not do it."""
        try:
            answer = self._client.post("/reset_prefix_cache", params={"reset_external": "true"})
            nudge(self._client, self._model, self._headers)
            return answer.is_success and bool(answer.json().get("success", True))
        except (httpx.HTTPError, ValueError):
            return False


@contextmanager
def opened(vllm: ProvingVllm) -> Iterator[Session]:
    """Run a vLLM until the end of the block.

    Raises:
        ServerFailedError: it did not start, or did not end in time.
    """
    with vllm, client_of(vllm.url, vllm.timeout_s) as client:
        yield Session(vllm, client)


def new_salts(prompts: Sequence[Content]) -> Salts:
    """Return a random salt for each prompt, with which vLLM's own cache finds nothing."""
    return [secrets.token_hex(16) for _ in prompts]


def _output_of(found: Sequence[Mapping[str, Any]]) -> Output:
    """Return the output of a stream.

    Raises:
        ValueError: it is an error, or was cut.
        LookupError: it is no completion with logprobs; also ``TypeError`` and ``AttributeError``.
    """
    if any("error" in event for event in found):
        raise ValueError("an error in place of an output")
    choices = [event["choices"][0] for event in found if event.get("choices")]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    best = [sorted(top.values(), reverse=True) for choice in choices for top in choice["logprobs"]["top_logprobs"]]
    gaps = [two[0] - two[1] if len(two) > 1 else float("inf") for two in best]
    usage: Mapping[str, Any] = next((event["usage"] for event in reversed(found) if event.get("usage")), {})
    if not len(tokens) == len(logprobs) == len(gaps) == OUTPUT_TOKENS:
        raise ValueError(f"{len(tokens)} tokens in place of {OUTPUT_TOKENS}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Output(tuple(tokens), tuple(map(float, logprobs)), tuple(gaps), usage["prompt_tokens"], cached)
