"""Tests of the proxy before two real vLLMs with a shared cache server, of which one computes prompts for the other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.cache_server import ServerProcess, short_folder
from support.disaggregated import PATIENT, Disaggregation, Work, unshared
from support.redis_server import wait_for
from support.vllm_engine import BLOCK_TOKENS, Engine, Prompt
from typer.testing import CliRunner

from kvstore.tools.cli import app
from kvstore.tools.models import TINY, as_text, random_tokens
from kvstore.tools.processes import free_port
from kvstore.tools.vllmclient import complete, read_counter

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

OUTPUT_TOKENS = 12
LONG = 3500  # takes many seconds
LENGTHS = (40, 64, 255, 256, 257, 300, 513, 700, 1000, 1500)
TEMPLATE = "{% for message in messages %} {{ message['content'] }}{% endfor %}"
ENGINE = """
remote_url: {url}
max_local_cpu_size: 0.25
local_cpu: false
load_only_if_faster: false
remote_lookup_cache_secs: 0.2
lookup_timeout_ms: 5000
"""

HANDED_OVER = f"""
enable_pd: true
pd_buffer_size: {256 << 20}
max_local_cpu_size: 0.25
load_only_if_faster: false
{PATIENT}"""

PROMPTS = [random_tokens(length, vocab=TINY.vocab, seed=length) for length in LENGTHS]
SYSTEM = random_tokens(300, vocab=TINY.vocab, seed=1)
USERS = [random_tokens(length, vocab=TINY.vocab, seed=length) for length in (80, 500)]
ALONE = random_tokens(400, vocab=TINY.vocab, seed=4)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with short_folder() as folder:
        server = ServerProcess(folder)
        try:
            yield server.start()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[list[str]]:
    """Return the words of plain vLLM's answers, up to its first tie."""
    prompts = [*PROMPTS, *(SYSTEM + user for user in USERS), ALONE]
    with Engine(tiny_model) as engine:
        outputs = engine.generate(prompts, max_tokens=OUTPUT_TOKENS, logprobs=2)
        tokenizer = engine.llm.get_tokenizer()
        return [tokenizer.decode(output.token_ids[: output.tie_at]).split() for output in outputs]


@pytest.fixture(scope="module")
def engines(
    plain: list[list[str]], tiny_model: Path, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Disaggregation]:
    """Yield the engines, started after plain vLLM has ended; the tests below use them in their order."""
    folder = tmp_path_factory.mktemp("proxy")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    lines = ENGINE.format(url=server.url)
    arguments = ("--chat-template", str(template))
    options = ("--health-interval-s", "0.5")
    with Disaggregation(
        tiny_model, folder, prefill=lines, decode=lines, arguments=arguments, options=options
    ) as engines:
        yield engines


def send_ahead(engines: Disaggregation, server: ServerProcess, prompt: Prompt) -> None:
    """Have the prefill engine compute a prompt, and wait until the server has all of it."""
    file = server.folder / "prompt.json"
    file.write_text(json.dumps(prompt), encoding="utf-8")
    asked = {"model": engines.model, "prompt": prompt, "max_tokens": 1}
    httpx.post(f"{engines.prefill.url}/v1/completions", json=asked, timeout=120, trust_env=False).raise_for_status()

    def has_come() -> bool:
        result = CliRunner().invoke(app, ["lookup", "--url", server.url, "--tokens", str(file), "--json"])
        whole = len(prompt) - len(prompt) % BLOCK_TOKENS
        return whole in json.loads(result.stdout)["found"].values()

    wait_for("the server has the prompt", has_come, timeout_s=60)


@pytest.mark.soak
def test_answers_are_those_of_one_vllm(engines: Disaggregation, server: ServerProcess, plain: list[list[str]]) -> None:
    num_handed_over, work = 0, Work(engines.decode)
    for number, (prompt, words) in enumerate(zip(PROMPTS, plain, strict=False)):
        is_sent_ahead = number % 2 == 1  # else the chunks race with the decode engine's lookup
        if is_sent_ahead:
            send_ahead(engines, server, prompt)
        if number % 4 < 2:
            text = complete(engines.proxy.url, engines.model, as_text(prompt), output_tokens=OUTPUT_TOKENS).text
        else:
            answer = engines.ask("/v1/completions", {"prompt": prompt, "max_tokens": OUTPUT_TOKENS})
            text = answer["choices"][0]["text"]
        assert text.split()[: len(words)] == words, f"prompt {number} differs from plain vLLM"
        computed = work.of(prompt)
        is_handed_over = computed == unshared(prompt)
        assert is_handed_over or not is_sent_ahead, f"decode computed {computed} tokens of prompt {number}"
        num_handed_over += is_handed_over
    assert num_handed_over > len(PROMPTS) // 2, "none of those that were not sent ahead"


def test_chats_are_those_of_one_vllm(engines: Disaggregation, plain: list[list[str]]) -> None:
    for user, words in zip(USERS, plain[len(PROMPTS) :], strict=False):
        messages = [{"role": "system", "content": as_text(SYSTEM)}, {"role": "user", "content": as_text(user)}]
        answer = engines.ask("/v1/chat/completions", {"messages": messages, "max_completion_tokens": OUTPUT_TOKENS})
        assert answer["usage"]["prompt_tokens"] == len(SYSTEM) + len(user)
        assert answer["choices"][0]["message"]["content"].split()[: len(words)] == words


@pytest.mark.soak
def test_what_vllm_finds_wrong_is_passed_on(engines: Disaggregation) -> None:
    asked = {"model": engines.model, "prompt": [1] * 5000, "max_tokens": 1}
    answers = [
        httpx.post(f"{url}/v1/completions", json=asked, timeout=60, trust_env=False)
        for url in (engines.proxy.url, engines.prefill.url)
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()


@pytest.mark.soak
def test_a_client_that_hangs_up_ends_its_request(engines: Disaggregation) -> None:
    url = engines.decode.url
    before = read_counter(url, "vllm:generation_tokens_total")
    asked = {"model": engines.model, "prompt": ALONE[:50], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    completions = f"{engines.proxy.url}/v1/completions"
    with httpx.stream("POST", completions, json=asked, timeout=60, trust_env=False) as answer:
        assert next(answer.iter_lines()).startswith("data: {")

    def nothing_runs() -> bool:
        engines.ask("/v1/completions", {"prompt": [1], "max_tokens": 1})  # vLLM counts running requests in a step
        return read_counter(url, "vllm:num_requests_running") == 0

    wait_for("nothing runs", nothing_runs, timeout_s=120)
    assert read_counter(url, "vllm:generation_tokens_total") - before < LONG


@pytest.mark.soak
def test_a_prefill_engine_that_is_killed(engines: Disaggregation, plain: list[list[str]]) -> None:
    engines.prefill.kill()
    answer = engines.ask("/v1/completions", {"prompt": ALONE, "max_tokens": OUTPUT_TOKENS})
    assert answer["choices"][0]["text"].split()[: len(plain[-1])] == plain[-1]
    assert answer["usage"]["prompt_tokens"] == len(ALONE)
    assert read_counter(engines.proxy.url, "kvstore_proxy_fallbacks_total") == 1


@pytest.mark.soak
def test_a_decode_engine_that_is_killed(engines: Disaggregation) -> None:
    """It is killed during a stream, and is still down at the next one."""
    asked = {"model": engines.model, "prompt": ALONE[:50], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    url = f"{engines.proxy.url}/v1/completions"
    with httpx.stream("POST", url, json=asked, timeout=60, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        engines.decode.kill()
        rest = [line for line in lines if line]
    assert rest[-1].startswith('data: {"error"')
    while (refused := httpx.post(url, json=asked, timeout=60, trust_env=False)).status_code == 502:
        time.sleep(0.1)  # its engine core ends a little later, and had the listening socket, too
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")


@pytest.mark.soak
def test_streams_that_begin_with_the_prefill_engines_token(
    plain: list[list[str]], tiny_model: Path, tmp_path: Path
) -> None:
    """Words and usage equal those of one vLLM, for texts and for tokens."""
    port = free_port()
    options = ("--decode-kv", f"kvs://127.0.0.1:{port}", "--first-token")
    decode = f"{HANDED_OVER}pd_peer_init_port: {port}\n"
    with Disaggregation(tiny_model, tmp_path, prefill=HANDED_OVER, decode=decode, options=options) as running:
        work = Work(running.decode)
        for number, (prompt, words) in enumerate(zip(PROMPTS, plain, strict=False)):
            text, usage = streamed(running, as_text(prompt) if number % 2 else prompt)
            assert text.split()[: len(words)] == words, f"prompt {number} differs from plain vLLM"
            assert usage["prompt_tokens"] == len(prompt)
            assert usage["completion_tokens"] == OUTPUT_TOKENS
        begun = read_counter(running.proxy.url, "kvstore_proxy_first_tokens_total")
        assert begun > len(PROMPTS) // 2
        asked = [*PROMPTS, [0] * begun]  # decode continues after a first token
        assert work.of(*asked) <= sum(map(unshared, PROMPTS)) + begun + BLOCK_TOKENS * len(PROMPTS)


def streamed(engines: Disaggregation, prompt: Prompt | str) -> tuple[str, dict[str, int]]:
    """Return the text and the usage of a stream."""
    asked = {"model": engines.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}
    more = {"ignore_eos": True, "skip_special_tokens": False, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{engines.proxy.url}/v1/completions", json=asked | more, timeout=120, trust_env=False)
    *chunks, last, done = answer.raise_for_status().text.rstrip().split("\n\n")
    assert done == "data: [DONE]"
    text = "".join(json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks)
    usage: dict[str, int] = json.loads(last.removeprefix("data: "))["usage"]
    return text, usage
