"""``kvstore probe`` against a server that answers as vLLM does. Real vLLM: tests/e2e/test_probe.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.answers import Answers, answering

from kvstore.index.plans import MissReason
from kvstore.ops.metrics import METRICS
from kvstore.tools.probe import reasons
from kvstore.tools.probe.counters import PREFIX
from kvstore.tools.probe.settling import END_TOKEN_ID, LOWEST_TOKEN_ID, made_up
from kvstore.tools.processes import free_port

RunJson = Any
KEY = "the-key"


@dataclass
class Fake:
    """A vLLM with the given counters, for each prompt that arrives a second time under another salt.

    Attributes:
        warm: growth of kvstore's counters with the second request, by name and label.
        cold: the same with the first request.
        has_store: it shows kvstore's metrics.
        has_metrics: it has ``/metrics``.
        shows_cached: it tells how many tokens of a prompt were cached.
        model_tokens: the longest prompt.
        status: of every answer.
        engines: those of its metrics.
        models: that it serves.
    """

    warm: dict[tuple[str, str], int] = field(default_factory=dict)
    cold: dict[tuple[str, str], int] = field(default_factory=lambda: {("stored_chunks", ""): 8})
    has_store: bool = True
    has_metrics: bool = True
    has_logs: bool = True
    shows_cached: bool = False
    model_tokens: int = 4096
    status: int = 200
    engines: int = 1
    models: tuple[str, ...] = ("the-model",)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    counted: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, grown: dict[tuple[str, str], int]) -> None:
        for key, number in grown.items():
            self.counted[key] = self.counted.get(key, 0) + number

    def take(self, body: dict[str, Any]) -> int:
        """Take a request, and return the tokens that it gets from the store."""
        is_again = any(body["prompt"] == before["prompt"] for before in self.asked)
        is_probe = "kv_transfer_params" in body
        self.asked.append(body)
        self.count({("lookups", ""): 1})
        if is_probe:
            self.count(self.warm if is_again else self.cold)
        return sum(n for (name, _), n in self.warm.items() if name == "hit_tokens") if is_again else 0

    def metrics(self) -> str:
        lines = ['vllm:prompt_tokens_total{engine="0"} 5'] if self.has_logs else []
        if self.has_store and self.has_logs:
            enabled = self.counted.get(("enabled", ""), 1)
            lines += [f'{PREFIX}enabled{{engine="{engine}"}} {enabled}' for engine in range(self.engines)]
        for (name, label), number in self.counted.items() if self.has_store and self.has_logs else ():
            if name != "enabled":
                labelled = f',{METRICS[name].labels[0]}="{label}"' if label else ""
                lines.append(f'{PREFIX}{name}_total{{engine="0"{labelled}}} {number}')
        return "".join(f"{line}\n" for line in lines)


@pytest.fixture
def fake() -> Fake:
    return Fake(warm={("hit_tokens", "memory"): 768, ("hit_tokens", "disk"): 224})


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    class Handler(Answers):
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            if self.path == "/v1/models":
                data = [{"id": name, "max_model_len": fake.model_tokens} for name in fake.models]
                self.answer(fake.status, json.dumps({"data": data}).encode())
            else:
                self.answer(200 if fake.has_metrics else 404, fake.metrics().encode())

        def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.headers.append(dict(self.headers))
            found = fake.take(body)
            details = {"prompt_tokens_details": {"cached_tokens": found}} if fake.shows_cached else {}
            events = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": {"prompt_tokens": 9, **details}}]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            self.answer(200, text.encode())

    with answering(Handler) as address:
        yield address


def test_a_hit(fake: Fake, url: str, run: Any, run_json: RunJson) -> None:
    code, tree = run_json("probe", "--url", url, "--tokens", "1000", "--api-key", KEY)
    assert (code, tree["found_tokens"], tree["tiers"]) == (0, 992, {"memory": 768, "disk": 224})
    assert tree["reason"] == tree["remedy"] == ""
    assert tree["cold_ttft_s"] > 0 < tree["warm_ttft_s"]
    assert fake.headers[0]["Authorization"] == f"Bearer {KEY}"
    cold, warm = [body for body in fake.asked if "kv_transfer_params" in body]
    assert cold["prompt"] == warm["prompt"]
    assert len(cold["prompt"]) == 1000
    assert cold["kv_transfer_params"] == warm["kv_transfer_params"], "one key in the store"
    assert cold["cache_salt"] != warm["cache_salt"], "and none in vLLM's own cache"
    assert "found: 992 tokens (memory 768, disk 224)" in run("probe", "--url", url, "--tokens", 1000).stdout


def test_every_prompt_is_new(fake: Fake, url: str, run_json: RunJson) -> None:
    for _ in range(2):
        run_json("probe", "--url", url, "--tokens", "100")
    probes = [body for body in fake.asked if "kv_transfer_params" in body]
    assert len({tuple(body["prompt"]) for body in probes}) == 2
    assert len({body["kv_transfer_params"]["kvstore.probe"] for body in probes}) == 2
    assert len({body["cache_salt"] for body in fake.asked}) == len(fake.asked)
    assert all(LOWEST_TOKEN_ID <= token < END_TOKEN_ID for token in made_up(5000))


MISSES = {reason: {("misses", reason.value): 1} for reason in MissReason}


@pytest.mark.parametrize("reason", MissReason)
def test_each_reason_of_a_miss_has_its_words(fake: Fake, url: str, run_json: RunJson, reason: MissReason) -> None:
    fake.warm = MISSES[reason]
    code, tree = run_json("probe", "--url", url, "--tokens", "100")
    expected = reasons._BY_REASON[reason]
    assert (code, tree["found_tokens"], tree["reason"], tree["remedy"]) == (1, 0, *expected)


def test_what_else_is_not_a_hit(fake: Fake, url: str, run_json: RunJson) -> None:
    def answer() -> tuple[int, str]:
        fake.asked.clear()
        code, tree = run_json("probe", "--url", url, "--tokens", "100")
        return code, tree["reason"]

    fake.warm = {("misses", "never_stored"): 1}
    fake.cold = {}
    assert answer() == (1, reasons._NOTHING_STORED.why)
    fake.cold = {("refused_chunks", ""): 3}
    assert answer() == (1, reasons._REFUSED.why)
    fake.cold = {("failed_stores", ""): 3}
    assert answer() == (1, reasons._FAILED.why)
    fake.counted["enabled", ""] = 0
    assert answer() == (1, reasons._OFF.why)
    assert not fake.asked, "no need to ask"
    fake.has_store = False
    assert answer() == (1, reasons.NO_STORE.why)
    assert not fake.asked


@pytest.mark.parametrize("lacks", ["has_metrics", "has_logs"])
def test_without_metrics_vllm_may_still_say_what_was_cached(
    fake: Fake, url: str, run_json: RunJson, lacks: str
) -> None:
    setattr(fake, lacks, False)
    code, tree = run_json("probe", "--url", url, "--tokens", "100")
    assert (code, tree["reason"]) == (1, reasons.NO_METRICS.why)
    fake.shows_cached = True
    code, tree = run_json("probe", "--url", url, "--tokens", "100")
    assert (code, tree["found_tokens"], tree["tiers"]) == (0, 992, {})
    assert "no metrics" in tree["notes"][0]


def test_other_requests_at_the_same_time_are_told(fake: Fake, url: str, run_json: RunJson) -> None:
    _, tree = run_json("probe", "--url", url, "--tokens", "100")
    assert not tree["notes"]
    fake.warm["lookups", ""] = 5
    code, tree = run_json("probe", "--url", url, "--tokens", "100")
    assert "other requests came" in tree["notes"][0]
    assert (code, tree["found_tokens"], tree["reason"]) == (1, 0, reasons.NOT_ALONE.why)
    fake.shows_cached = True
    code, tree = run_json("probe", "--url", url, "--tokens", "100")
    assert (code, tree["reason"]) == (0, "")


def test_one_of_several_engines_is_asked_twice(fake: Fake, url: str, run_json: RunJson) -> None:
    fake.engines = 3
    _, tree = run_json("probe", "--url", url, "--tokens", "100")
    assert {headers["X-data-parallel-rank"] for headers in fake.headers} == {"0"}
    assert "the first of 3 engines" in tree["notes"][0]


def test_a_prompt_that_the_model_does_not_take_is_cut(fake: Fake, url: str, run_json: RunJson) -> None:
    fake.model_tokens = 512
    _, tree = run_json("probe", "--url", url)
    assert tree["prompt_tokens"] == 504
    assert "512" in tree["notes"][0]


@pytest.mark.parametrize(
    ("status", "words"), [(401, "--api-key"), (403, "--api-key"), (500, "answers 500"), (404, "answers 404")]
)
def test_a_server_that_refuses(fake: Fake, url: str, run: Any, status: int, words: str) -> None:
    fake.status = status
    result = run("probe", "--url", url)
    assert (result.exit_code, words in result.stderr) == (2, True)


def test_what_cannot_be_probed(fake: Fake, url: str, run: Any) -> None:
    for arguments, words in (
        (("--url", f"http://127.0.0.1:{free_port()}"), "no vLLM answers"),
        (("--url", "localhost:8000"), "http://HOST:PORT"),
        (("--url", "nowhere"), "http://HOST:PORT"),
        (("--url", url, "--model", "another"), "serves the-model"),
        (("--url", url, "--tokens", "0"), "at least 1"),
        (("--url", f"{url}/metrics?"), "no vLLM answers"),
    ):
        result = run("probe", *arguments)
        assert (result.exit_code, words in result.stderr) == (2, True), (arguments, result.stderr)
    fake.models = ()
    assert "serves no model" in run("probe", "--url", url).stderr
