"""The course of ``kvstore prove`` over vLLMs that are made up: what is asked of whom, and what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import ConfigError
from kvstore.tools.interrupts import Interruption
from kvstore.tools.probe.counters import PREFIX, Counters
from kvstore.tools.prove import run as course
from kvstore.tools.prove.outputs import NoOutput, Output, Outputs
from kvstore.tools.prove.session import ProvingVllm
from kvstore.tools.prove.situations import Measured, Situation
from kvstore.tools.vllmserver import ServerFailedError

OWN = ["plain", "plain-again", "plain-together", "own-hit", "own-hit-again"]
LINES = """\
max_local_cpu_size: 1
local_disk: {folder}/kv/disk
max_local_disk_size: 1
remote_url: kvs+ipc://{folder}/cache
"""


class World:
    """Everything that made-up vLLMs share.

    Attributes:
        stored: names of prompts, by the tier that has them.
        server: whether a private server runs.
        starts: logs of the vLLMs that were started.
        breaks: an error at the start of the vLLM with this log.
        wrong: tiers that answer with another token.
    """

    def __init__(self) -> None:
        self.stored: dict[str, set[str]] = {}
        self.server = False
        self.starts: list[str] = []
        self.breaks: dict[str, BaseException] = {}
        self.wrong: set[str] = set()
        self.has_own_cache = True
        self.can_forget = True
        self.files: list[str] = []


class FakeSession:
    """A vLLM whose hits come from the first tier of its configuration that has a prompt."""

    def __init__(self, vllm: ProvingVllm, world: World) -> None:
        self.vllm, self.world = vllm, world
        self.max_model_tokens = 4096
        self.counts: dict[tuple[str, str], float] = {}
        self.salts: set[str] = set()
        self.memory: set[str] = set()
        changes = dict(vllm.changes or {})
        self.folders = [Path(folder) for folder in changes.get("local_disk") or []]  # type: ignore[attr-defined]
        self.url = changes.get("remote_url", vllm.settings.config.remote_url)
        self.keeps = changes.get("local_cpu", True)

    @property
    def is_private(self) -> bool:
        return self.url == "private"

    def tiers(self) -> Iterator[tuple[str, set[str]]]:
        if self.keeps:
            yield "memory", self.memory
        for folder in self.folders:
            yield "disk", self.world.stored.setdefault(str(folder), set())
        if self.url is not None and (self.world.server or not self.is_private):
            yield "remote", self.world.stored.setdefault(str(self.url), set())

    def count(self, name: str, label: str, number: int) -> None:
        key = f"{PREFIX}{name}_total", label
        self.counts[key] = self.counts.get(key, 0) + number

    def ask(self, prompt: Any, salt: str, name: str | None = None) -> Output | NoOutput:
        plain = Output((len(prompt), 1), (-0.5, -0.5), (1.0, 1.0), len(prompt), 0)
        if name is None or self.vllm.changes is None:
            is_cached = salt in self.salts and self.world.has_own_cache
            self.salts.add(salt)
            return replace(plain, cached_tokens=len(prompt) - 1) if is_cached else plain
        for tier, names in self.tiers():
            if name in names:
                self.count("hit_tokens", tier, len(prompt) - 1)
                if tier == "disk" and self.is_damaged():
                    self.count("lost_chunks", "", 1)
                    return plain
                self.count("moved_bytes", f"{tier}|load", 4096)
                hit = replace(plain, cached_tokens=len(prompt) - 1)
                return replace(hit, tokens=(0, 0)) if tier in self.world.wrong else hit
        for tier, names in self.tiers():
            names.add(name)
            self.count("moved_bytes", f"{tier}|store", 4096)
        for folder in self.folders:
            (folder / f"{name}.safetensors").write_bytes(bytes(4096))
            self.world.files.append(str(folder))
        self.count("moved_bytes", "memory|store", 4096)
        return plain

    def is_damaged(self) -> bool:
        return any(file.read_bytes() != bytes(4096) for folder in self.folders for file in folder.iterdir())

    def one_by_one(
        self, prompts: Sequence[Any], salts: Sequence[str], name: str | None = None, *, begin: int = 0
    ) -> Outputs:
        return [
            self.ask(prompt, salt, None if name is None else f"{name}-{number}")
            for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True), begin)
        ]

    def together(self, prompts: Sequence[Any], salts: Sequence[str]) -> Outputs:
        return self.one_by_one(prompts, salts)

    def measure(self, asking: Callable[[], Outputs], *, stores: bool = False) -> Measured:
        before = Counters(dict(self.counts), 1)
        outputs = asking()
        return Measured(outputs, before, Counters(dict(self.counts), 1))

    def forget(self) -> bool:
        if self.world.can_forget:
            self.world.stored.pop(str(self.url), None)
        return self.world.can_forget


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    @contextmanager
    def opened(vllm: ProvingVllm) -> Iterator[FakeSession]:
        world.starts.append(vllm.log.stem)
        if (error := world.breaks.get(vllm.log.stem)) is not None:
            raise error
        vllm.log.write_text("")
        session = FakeSession(vllm, world)
        monkeypatch.setattr(vllm, "_process", object())
        yield session

    @contextmanager
    def private_remote(tier: str) -> Iterator[str]:
        assert tier == "server"
        world.server = True
        try:
            yield "private"
        finally:
            world.server = False

    monkeypatch.setattr(course, "opened", opened)
    monkeypatch.setattr(course, "private_remote", private_remote)
    monkeypatch.setattr(ProvingVllm, "_kill_group", lambda *_: None)
    return world


Prove = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def prove(tmp_path: Path, run_json: Any) -> Prove:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kvstore.yaml").write_text(LINES.format(folder=tmp_path))

    def prove_(*options: object) -> tuple[int, dict[str, Any]]:
        places = ("--config", tmp_path / "kvstore.yaml", "--out", tmp_path / "proof")
        code, sealed = run_json("prove", *places, *options, "--json", "--", "model")
        return code, sealed["certificate"] if isinstance(sealed, dict) else {"error": sealed}

    return prove_


@pytest.fixture
def run_json(run: Any) -> Any:
    """Return the house's function, for a command whose arguments end with another's."""

    def run_(*arguments: object) -> tuple[int, Any]:
        result = run(*arguments)
        return result.exit_code, json.loads(result.stdout) if result.stdout else result.stderr

    return run_


def verdicts(certificate: dict[str, Any]) -> dict[str, str]:
    return {one["situation"]: one["verdict"] for one in certificate["situations"]}


def test_every_situation_is_proven(world: World, prove: Prove, tmp_path: Path) -> None:
    code, found = prove()
    names = [*OWN, "cold", "memory", "disk", "damaged-disk", "remote", "killed-server"]
    assert (code, verdicts(found)) == (0, dict.fromkeys(names, "proven")), found["situations"]
    assert world.starts == ["plain", "store", "disk", "remote", "killed-server"]
    assert found["left_out"] == []
    by_name = {one["situation"]: one for one in found["situations"]}
    for tier in ("memory", "disk", "remote"):
        assert set(by_name[tier]["hit_tokens"]) == {tier}
    assert by_name["killed-server"]["cached_tokens"] < by_name["remote"]["cached_tokens"]
    assert by_name["killed-server"]["hit_tokens"].keys() == {"remote"}
    assert world.files
    assert not list((tmp_path / "kv").iterdir()), "its folder is gone"
    assert f"kvs+ipc://{tmp_path}/cache" not in world.stored, "and what it stored elsewhere"
    assert not world.server
    page = (tmp_path / "proof" / "certificate.html").read_text()
    assert "Proven: with kvstore vLLM answered as without it" in page


def test_the_users_prompts(world: World, prove: Prove, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a prompt that nobody may read")
    code, found = prove("--prompts", file)
    assert (code, found["prompts"]["count"]) == (0, 1)
    assert found["left_out"] == ["killed-server: it needs two prompts"]
    assert not any("nobody may read" in path.read_text() for path in (tmp_path / "proof").iterdir())


@pytest.mark.parametrize(
    ("only", "starts", "names"),
    [
        ("cold", ["plain", "store"], ["cold"]),
        ("memory", ["plain", "store"], ["cold", "memory"]),
        ("disk", ["plain", "store", "disk"], ["cold", "disk"]),
        ("damaged-disk", ["plain", "store", "disk"], ["cold", "damaged-disk"]),
        ("remote", ["plain", "store", "remote"], ["cold", "remote"]),
        ("killed-server", ["plain", "killed-server"], ["killed-server"]),
    ],
)
def test_only_one(world: World, prove: Prove, tmp_path: Path, only: str, starts: list[str], names: list[str]) -> None:
    """The remote tier gets nothing that is not read from it, and removed, again."""
    code, found = prove("--only", only)
    assert (code, verdicts(found)) == (0, dict.fromkeys([*OWN, *names], "proven")), found["situations"]
    assert world.starts == starts
    assert f"kvs+ipc://{tmp_path}/cache" not in world.stored
    assert bool(world.files) == ("disk" in only)


def test_only_vllm_itself_proves_nothing(world: World, prove: Prove) -> None:
    code, found = prove("--only", "plain")
    assert (code, found["verdict"]) == (3, "not proven")


@pytest.mark.parametrize("tier", ["memory", "disk", "remote"])
def test_a_tier_that_answers_wrongly(world: World, prove: Prove, tier: str) -> None:
    world.wrong = {tier}
    code, found = prove()
    assert (code, found["verdict"], verdicts(found)[tier]) == (1, "differs", "differs")
    assert {name for name, state in verdicts(found).items() if state == "differs"} <= {tier, "killed-server"}


def test_a_vllm_that_does_not_start(world: World, prove: Prove, tmp_path: Path) -> None:
    """The other situations are tried all the same; without stored chunks none is read."""
    world.breaks = {"disk": ServerFailedError("vLLM ended while starting")}
    code, found = prove()
    states = verdicts(found)
    assert (code, states["disk"], states["damaged-disk"], states["remote"]) == (3, *["not proven"] * 2, "proven")
    assert "vLLM ended while starting: see disk.log" in json.dumps(found["situations"])
    world.starts.clear()
    world.breaks = {"store": ServerFailedError("vLLM ended while starting")}
    code, found = prove()
    assert (code, verdicts(found)["cold"], "disk" in verdicts(found)) == (3, "not proven", False)
    assert world.starts == ["plain", "store", "killed-server"]
    world.breaks = {"plain": ServerFailedError("vLLM ended while starting")}
    assert prove()[0] == 2
    assert not list((tmp_path / "kv").iterdir())


def test_plain_vllm_must_answer(world: World, prove: Prove, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "ask", lambda *_: NoOutput("vLLM answered 400"))
    code, found = prove()
    assert (code, "vLLM alone has no output for prompt 1: vLLM answered 400" in found["error"]) == (2, True)


def test_without_vllms_own_prefix_cache(world: World, prove: Prove) -> None:
    world.has_own_cache = False
    code, found = prove()
    assert (code, [name for name in verdicts(found) if name.startswith("own")]) == (0, [])
    assert found["left_out"] == ["vLLM's own hit: its prefix cache did not have every prompt"]


def test_what_cannot_be_removed_is_named(world: World, prove: Prove, tmp_path: Path) -> None:
    world.can_forget = False
    code, found = prove()
    (line,) = found["left_out"]
    assert (code, line.startswith(f"removal of what this proof stored at kvs+ipc://{tmp_path}/cache")) == (0, True)


def test_a_server_that_was_not_killed_is_not_proven(
    world: World, prove: Prove, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def immortal(_tier: str) -> Iterator[str]:
        world.server = True
        yield "private"

    monkeypatch.setattr(course, "private_remote", immortal)
    code, found = prove("--only", "killed-server")
    (one,) = [one for one in found["situations"] if one["situation"] == "killed-server"]
    assert (code, one["verdict"]) == (3, "not proven")
    assert one["words"].endswith("tokens were found after the server was killed")


@pytest.mark.parametrize("error", [ConfigError("the cache server does not start"), ImportError("no zmq")])
def test_a_private_server_that_does_not_start_costs_no_result(
    world: World, prove: Prove, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(_tier: str) -> Any:
        raise error

    monkeypatch.setattr(course, "private_remote", contextmanager(broken))
    code, found = prove()
    assert (code, found["left_out"]) == (0, [f"killed-server: {error}"])
    assert prove("--only", "killed-server")[0] == 3


def test_a_remote_vllm_that_does_not_start_leaves_chunks_and_says_so(world: World, prove: Prove) -> None:
    world.breaks = {"remote": ServerFailedError("vLLM ended while starting")}
    code, found = prove()
    assert (code, [line.startswith("removal of what") for line in found["left_out"]]) == (3, [True])


def test_an_earlier_certificate_does_not_outlive_a_proof_that_fails(world: World, prove: Prove, tmp_path: Path) -> None:
    assert prove()[0] == 0
    world.breaks = {"plain": ServerFailedError("vLLM ended while starting")}
    assert prove()[0] == 2
    assert not list((tmp_path / "proof").glob("certificate.*"))


def test_a_folder_that_cannot_be_written(world: World, run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("prove", "--out", tmp_path / "file", "--", "model")
    assert (result.exit_code, "cannot be written" in result.stderr, world.starts) == (2, True, [])


@pytest.mark.parametrize("only", [[], ["cold"], ["memory"], ["damaged-disk"], ["killed-server"], ["plain"]])
def test_each_stage_is_reported(world: World, tmp_path: Path, only: list[str]) -> None:
    config, said = tmp_path / "kvstore.yaml", list[str]()
    config.write_text(LINES.format(folder=tmp_path))
    situations = [Situation(name) for name in only]
    options = course.ProveOptions(["model"], config, None, tmp_path / "proof", situations)
    course.prove(options, said.append)
    assert len(said) == course.count_stages(options), said


def test_an_interrupt_leaves_no_folder(world: World, prove: Prove, run: Any, tmp_path: Path) -> None:
    world.breaks = {"disk": Interruption()}
    places = ("--config", tmp_path / "kvstore.yaml", "--out", tmp_path / "proof")
    assert run("prove", *places, "--", "model").exit_code == 130
    assert not list((tmp_path / "kv").iterdir())
    assert not (tmp_path / "proof" / "certificate.json").exists()
