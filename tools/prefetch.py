"""Implementation of ``kvstore prefetch``, which makes a running vLLM load prompts from its slower tiers in advance.

Each prompt is sent to the server for one token. The server loads stored chunks from its tiers into CPU memory and its
prefix cache, in the same way and under the same keys as for a user, and computes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

try:
    import httpx
except ImportError as error:
    raise ImportError("prefetch needs httpx: pip install 'vllm-kvstore[warm]'") from error

from kvstore.model.errors import ConfigError
from kvstore.tools.vllmclient import TOKENS_LOADED, client_of, read_counter
from kvstore.tools.warm.prompts import Chat, Prompt, Rejected

_TIMEOUT_S = 600.0


@dataclass
class PrefetchReport:
    """Result of a run.

    Attributes:
        prompts: number of prompts that the server answered.
        refused: prompts that it did not answer, and malformed ones, each with its place and the reason.
        tokens: tokens of all answered prompts.
        tokens_loaded: tokens loaded from the server's tiers during the run, also for other requests.
        seconds: duration of the whole run.
        interrupted: whether the run was stopped before the last prompt.
    """

    prompts: int = 0
    refused: list[Rejected] = field(default_factory=list)
    tokens: int = 0
    tokens_loaded: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        """True if every prompt was answered."""
        return not (self.refused or self.interrupted)


def prefetch(
    server: str,
    model: str,
    prompts: Iterable[Prompt | Rejected],
    *,
    salt: str | None = None,
    api_key: str | None = None,
    tick: Callable[[PrefetchReport], None] = lambda _report: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PrefetchReport:
    """Ask a server for one token of every prompt, one after the other.

    Args:
        server: the server's address, such as ``http://127.0.0.1:8000``.
        model: the server's name of the model, or the name of an adapter.
        prompts: result of ``read_prompts``.
        salt: ``cache_salt`` of prompts without one.
        api_key: the server's API key; None if it needs none.
        tick: called after each prompt.
        should_stop: called before each prompt.

    Raises:
        ConfigError: the server does not answer, or is not vLLM.
    """
    report = PrefetchReport()
    begin_s = time.monotonic()
    with client_of(server, _TIMEOUT_S, api_key=api_key) as client:
        loaded_before = _loaded(server)
        for prompt in prompts:
            if should_stop():
                report.interrupted = True
                break
            _ask(client, model, prompt, salt, report)
            report.seconds = time.monotonic() - begin_s
            tick(report)
        report.tokens_loaded = _loaded(server) - loaded_before
    report.seconds = time.monotonic() - begin_s
    return report


def _loaded(server: str) -> int:
    try:
        return read_counter(server, TOKENS_LOADED)
    except httpx.HTTPError as error:
        raise ConfigError(f"the server at {server} does not show its metrics ({error}): is vLLM there?") from error


def _ask(client: httpx.Client, model: str, prompt: Prompt | Rejected, salt: str | None, report: PrefetchReport) -> None:
    if isinstance(prompt, Rejected):
        report.refused.append(prompt)
        return
    path, body = _request(prompt, salt)
    try:
        answer = client.post(path, json={"model": model, "max_tokens": 1, "temperature": 0, **body})
        if answer.is_success:
            report.tokens += int(answer.json()["usage"]["prompt_tokens"])
            report.prompts += 1
        else:
            report.refused.append(Rejected(prompt.where, f"the server answers {answer.status_code}"))
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the server at {client.base_url} does not answer as vLLM does: {error!r}") from error


def _request(prompt: Prompt, salt: str | None) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a prompt's request."""
    found = prompt.salt or salt
    body: dict[str, Any] = {"cache_salt": found} if found else {}
    if not isinstance(prompt.content, Chat):
        return "/v1/completions", {**body, "prompt": prompt.content}
    body["messages"] = list(prompt.content.messages)
    if prompt.content.tools:
        body["tools"] = list(prompt.content.tools)
    return "/v1/chat/completions", {**body, "add_generation_prompt": prompt.content.add_generation_prompt}
