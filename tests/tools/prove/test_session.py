"""Requests of ``kvstore prove`` to a server that answers as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.answers import Answers, answering

from kvstore.tools.probe.counters import PREFIX
from kvstore.tools.prove.outputs import NoOutput, Output
from kvstore.tools.prove.prompts import OUTPUT_TOKENS
from kvstore.tools.prove.session import ProvingVllm, Session, new_salts
from kvstore.tools.prove.settings import read_settings
from kvstore.tools.vllmclient import client_of
from kvstore.tools.vllmserver import ServerFailedError

USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}


def choice(token: int, **changes: Any) -> dict[str, Any]:
    top = {"a": -0.5, "b": -2.0}
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [top]}
    return {"choices": [{"token_ids": [token], "logprobs": logprobs, **changes}]}


GOOD = [*(choice(token) for token in range(OUTPUT_TOKENS)), {"choices": [], "usage": USAGE}]


class Fake(Answers):
    events: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []
    headers_seen: ClassVar[list[str | None]] = []
    status: ClassVar[int] = 200
    reset: ClassVar[tuple[int, str]] = (200, '{"success": true}')
    models: ClassVar[str] = '{"data": [{"id": "m", "max_model_len": 2048}]}'
    together: ClassVar[threading.Barrier | None] = None

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        page = f'{PREFIX}hit_tokens_total{{tier="disk"}} {len(self.asked)}\n'
        self.answer(200, (self.models if self.path == "/v1/models" else page).encode())

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.path.startswith("/reset_prefix_cache"):
            assert self.path.endswith("?reset_external=true")
            self.answer(self.reset[0], self.reset[1].encode())
            return
        self.asked.append(body)
        self.headers_seen.append(self.headers["X-data-parallel-rank"])
        if self.together is not None:
            self.together.wait(30)
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in self.events)
        self.answer(self.status, f"{text}data: [DONE]\n\n".encode())


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProvingVllm]:
    for name, value in {"events": GOOD, "asked": [], "headers_seen": []}.items():
        monkeypatch.setattr(Fake, name, value)
    with answering(Fake) as url:
        process = ProvingVllm(read_settings(["m", "-dp", "2"], None, "run"), tmp_path / "log", {}, 5.0)
        process.port = int(url.rpartition(":")[2])
        yield process


@pytest.fixture
def session(vllm: ProvingVllm) -> Iterator[Session]:
    with client_of(vllm.url, 5.0) as client:
        yield Session(vllm, client)


def test_an_output(session: Session) -> None:
    tokens = tuple(range(OUTPUT_TOKENS))
    expected = Output(tokens, (-0.5,) * OUTPUT_TOKENS, (1.5,) * OUTPUT_TOKENS, 9, 8)
    assert session.ask([1, 2], "salt", "name") == expected
    (asked,) = Fake.asked
    assert (asked["prompt"], asked["cache_salt"], asked["temperature"], asked["ignore_eos"]) == (
        [1, 2],
        "salt",
        0,
        True,
    )
    assert asked["kv_transfer_params"] == {"kvstore.probe": "name"}
    assert Fake.headers_seen == ["0"], "each replica has its own memory"
    session.ask("text", "salt")
    assert "kv_transfer_params" not in Fake.asked[1]


def test_each_prompt_has_its_own_name_and_salt(session: Session) -> None:
    prompts = ["a", "b", "c"]
    session.one_by_one(prompts, new_salts(prompts), "run")
    session.one_by_one(prompts[2:], new_salts(prompts[2:]), "run", begin=2)
    names = [asked["kv_transfer_params"]["kvstore.probe"] for asked in Fake.asked]
    assert names == ["run-0", "run-1", "run-2", "run-2"]
    assert len({asked["cache_salt"] for asked in Fake.asked}) == 4


def test_all_at_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "together", threading.Barrier(3))
    monkeypatch.setattr(session.vllm, "_process", object())
    outputs = session.together(["a", "b", "c"], ["1", "2", "3"])
    assert [type(output) for output in outputs] == [Output] * 3


@pytest.mark.parametrize(
    "events",
    [
        GOOD[1:],
        [*GOOD[:-2], GOOD[-1]],
        GOOD[:-1],
        [*GOOD, choice(1)],
        [*GOOD[:3], {"error": {"message": "the prompt is: secret"}}, *GOOD[3:]],
        [choice(1, token_ids=None), *GOOD[1:]],
        [choice(1, logprobs=None), *GOOD[1:]],
        [choice(1, logprobs={"token_logprobs": [None], "top_logprobs": [None]}), *GOOD[1:]],
        [],
    ],
)
def test_an_answer_that_is_not_whole_is_none(
    session: Session, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "events", events)
    output = session.ask("secret", "salt")
    assert isinstance(output, NoOutput)
    assert "secret" not in output.why


def test_a_refusal_and_a_vllm_that_has_ended(
    session: Session, vllm: ProvingVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "status", 500)
    assert session.ask("a", "salt") == NoOutput("vLLM answered 500")
    measured = session.measure(lambda: session.one_by_one(["a"], ["salt"]))
    assert (measured.before, measured.after) == (None, None)
    assert measured.outputs == [NoOutput("vLLM answered 500")]
    assert not session.forget()
    with client_of("http://127.0.0.1:9", 5.0) as nobody, pytest.raises(ServerFailedError, match="which model"):
        Session(vllm, nobody)
    monkeypatch.setattr(Fake, "models", '{"data": []}')
    with client_of(vllm.url, 5.0) as client, pytest.raises(ServerFailedError, match="which model"):
        Session(vllm, client)


def test_counters_before_and_after(session: Session, vllm: ProvingVllm) -> None:
    """Requests that only make vLLM report its counters come before each reading."""
    measured = session.measure(lambda: session.one_by_one(["a", "b"], ["1", "2"], "run"))
    assert measured.before is not None
    assert measured.grown("hit_tokens_total")["disk"] >= 3
    vllm.changes = None
    assert session.measure(lambda: session.one_by_one(["a"], ["1"])).before is None


@pytest.mark.parametrize(
    ("reset", "is_done"),
    [((200, '{"success": true}'), True), ((200, '{"success": false}'), False), ((404, "{}"), False)],
)
def test_what_is_stored_is_removed(
    session: Session, reset: tuple[int, str], is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "reset", reset)
    assert session.forget() is is_done
