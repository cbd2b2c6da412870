"""Sessions of the official clients of OpenAI and Anthropic, through the proxy before two real vLLMs with disks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic.types import MessageParam, TextBlockParam
from support.disaggregated import Disaggregation
from support.redis_server import wait_for

from kvstore.format.retentions import RetentionRecords
from kvstore.model.retention import Retention
from kvstore.tools.models import TINY, as_text, random_tokens
from kvstore.tools.vllmclient import read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

TEMPLATE = "{% for message in messages %} {{ message['content'] }}{% endfor %}"
DISK_CHUNKS = 40
LINES = """
local_disk: {folder}
max_local_disk_size: {gib}
max_local_cpu_size: 0.1
load_only_if_faster: false
request_fields: retain
retain_max_secs: 7200
cache_policy: LRU
"""
CHUNK_GIB = (1 << 20) * 1.01 / (1 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def engines(tiny_model: Path, folder: Path) -> Iterator[Disaggregation]:
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    lines = [LINES.format(folder=folder / role, gib=DISK_CHUNKS * CHUNK_GIB) for role in ("prefill", "decode")]
    arguments = ("--chat-template", str(template), "--enable-prompt-tokens-details")
    with Disaggregation(
        tiny_model, folder, prefill=lines[0], decode=lines[1], arguments=arguments, options=("--retain",)
    ) as engines:
        yield engines


def openai_client(engines: Disaggregation) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{engines.proxy.url}/v1", api_key="none", http_client=http, max_retries=0, timeout=120
    )


def text(seed: int, num_tokens: int = 600) -> str:
    return as_text(random_tokens(num_tokens, vocab=TINY.vocab, seed=seed))


def hints(engines: Disaggregation, result: str) -> int:
    """Return the retentions of the prefill engine; a decode engine stores nothing."""
    return read_counter(engines.prefill.url, "vllm:kvstore_hints_total", {"hint": "retain", "result": result})


def test_the_fields_of_official_clients_arrive_act_and_are_counted(engines: Disaggregation) -> None:
    with openai_client(engines) as theirs:
        for _ in range(2):
            answer = theirs.chat.completions.create(
                model=engines.model,
                messages=[{"role": "user", "content": text(1)}],
                max_tokens=4,
                prompt_cache_key="session one",
                prompt_cache_retention="24h",
            )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 500
        assert hints(engines, "done") >= 1

    http = anthropic.DefaultHttpxClient(trust_env=False)
    with anthropic.Anthropic(
        base_url=engines.proxy.url, api_key="none", http_client=http, max_retries=0, timeout=120
    ) as asks:
        part: TextBlockParam = {"type": "text", "text": text(2), "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        asked: list[MessageParam] = [{"role": "user", "content": [part]}]
        first = asks.messages.create(model=engines.model, max_tokens=4, messages=asked)
        with asks.messages.stream(model=engines.model, max_tokens=4, messages=asked) as stream:
            last = stream.get_final_message()
        assert first.stop_reason == last.stop_reason == "max_tokens"
        assert (last.usage.cache_read_input_tokens or 0) > 500
        assert hints(engines, "done") >= 3


def test_an_idle_engine_has_noted_what_it_retains(engines: Disaggregation, folder: Path) -> None:
    """Nothing follows the last request; a restart would find what it asked for."""
    before = len(noted(folder))
    with openai_client(engines) as theirs:
        theirs.completions.create(
            model=engines.model, prompt=text(7, 520), max_tokens=1, extra_body={"prompt_cache_retention": "24h"}
        )
    wait_for("the note", lambda: len(noted(folder)) >= before + 2, timeout_s=20)
    assert all(time.time() < one.until_s < time.time() + 7200 for one in noted(folder))


def noted(folder: Path) -> list[Retention]:
    return [
        one for note in (folder / "prefill").rglob("retained") for one in RetentionRecords().read(note.read_bytes())
    ]


def test_a_client_that_retains_everything_stays_within_its_share(engines: Disaggregation) -> None:
    with openai_client(engines) as theirs:
        for seed in range(100, 130):
            theirs.completions.create(
                model=engines.model, prompt=text(seed), max_tokens=1, extra_body={"prompt_cache_retention": "24h"}
            )
            assert read_counter(engines.prefill.url, "vllm:kvstore_retained_chunks") <= DISK_CHUNKS // 4
    assert hints(engines, "refused") > 5
    assert read_counter(engines.prefill.url, "vllm:kvstore_retained_chunks") > DISK_CHUNKS // 8
    assert read_counter(engines.prefill.url, "vllm:kvstore_evicted_chunks_total", {"tier": "disk"}) > 10
