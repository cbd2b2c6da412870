"""The soak: its progress survives interruptions, failures are told with their seed, and it notices planted defects."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from soak import __main__ as command
from soak import clients, course, killed, messages, operations, parsing, requests
from soak.memory import growth_bytes, slope_mib_per_hour
from soak.part import Batch, Do, Part
from soak.progress import MAX_FAILURES, Tally, opened
from support.parsers import PARSERS

from kvstore.format import images
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError
from kvstore.tiers.disk.chunkio import ChunkIO
from kvstore.tiers.disk.tier import DiskTier

MIB = 1 << 20
OTHER_PARTS = '{"version": 1, "first_seed": 1, "parts": {"made": {"unknown": 1}}}'


def part_of(do: Do, wanted: int = 100, starts: list[None] | None = None) -> Part:
    """Return a part that does this for each batch."""

    @contextmanager
    def open_(_: Path) -> Iterator[Do]:
        if starts is not None:
            starts.append(None)
        yield do

    return Part("made", "things", wanted, open_)


def run(part: Part, path: Path, limit_s: float = 600.0) -> Tally:
    with opened(path) as progress:
        course.run(part, progress, part.wanted, limit_s, lambda *_: None)
        return progress.of(part.name)


class TestProgress:
    def test_it_goes_on_where_it_was(self, tmp_path: Path) -> None:
        seeds: list[int] = []

        def do(seed: int) -> Batch:
            if len(seeds) == 3:
                seeds.append(-1)
                raise KeyboardInterrupt
            seeds.append(seed)
            return Batch(20, notes={"seen": 2})

        path = tmp_path / "progress"
        with pytest.raises(KeyboardInterrupt):
            run(part_of(do), path)
        assert json.loads(path.read_text())["parts"]["made"]["count"] == 60
        tally = run(part_of(do), path)
        assert seeds == [1, 2, 3, -1, 4, 5]
        assert (tally.count, tally.batches, tally.failed, tally.notes) == (100, 5, 0, {"seen": 10})
        assert run(part_of(do), path).batches == 5, "it has enough"

    def test_a_short_time_is_one_batch(self, tmp_path: Path) -> None:
        for number in (1, 2):
            assert run(part_of(lambda _: Batch(1)), tmp_path / "progress", limit_s=1e-9).batches <= number

    @pytest.mark.parametrize(
        "text", ["", "[]", '{"version": 1}', '{"version": 2}', '{"version":1,"first_seed":1,"parts":{"a":{"x":1}}}']
    )
    def test_another_file_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "progress"
        path.write_text(text)
        with pytest.raises(ConfigError, match="--state"), opened(path):
            pass
        assert path.read_text() == text

    def test_two_at_once_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "progress"
        with opened(path), pytest.raises(ConfigError, match="another soak"), opened(path):
            pass

    def test_everything_is_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "progress"
        with opened(path) as progress:
            tally = progress.of("made")
            tally.memory.append([])
            tally.sample(1.5, 7)
            tally.fail(3, "why")
            progress.save()
        with opened(path) as again:
            assert again == progress


class TestFailures:
    def test_each_is_kept_with_its_seed_and_the_part_starts_again(self, tmp_path: Path) -> None:
        starts: list[None] = []

        def do(seed: int) -> Batch:
            if seed == 2:
                raise ValueError("it broke")
            return Batch(50, wrong=int(seed == 3), what="another byte")

        tally = run(part_of(do, 150, starts), tmp_path / "progress")
        assert (tally.count, tally.wrong, tally.failed, len(starts)) == (150, 1, 1, 3)
        assert [failure.seed for failure in tally.failures] == [2, 3]
        assert "ValueError: it broke (test_soak.py" in tally.failures[0].what
        assert course.once(part_of(do), 2).failed == course.once(part_of(do), 3).wrong == 1

    def test_it_ends_after_some(self, tmp_path: Path) -> None:
        def do(_: int) -> Batch:
            pytest.fail("always")

        assert run(part_of(do), tmp_path / "progress").failed == MAX_FAILURES

    def test_memory_that_grows(self, tmp_path: Path) -> None:
        tally = run(part_of(lambda seed: Batch(5, memory=[seed * 10 * MIB])), tmp_path / "progress")
        assert tally.failed >= 1
        assert "memory grows" in tally.failures[0].what

    def test_memory_that_is_flat(self, tmp_path: Path) -> None:
        tally = run(part_of(lambda seed: Batch(5, memory=[(100 + seed % 3) * MIB])), tmp_path / "progress")
        assert (tally.failed, len(tally.memory[0])) == (0, 20)


def test_growth_and_slope() -> None:
    life = [(float(number), (100 + number) * MIB) for number in range(40)]
    assert growth_bytes(life) == 18 * MIB
    assert slope_mib_per_hour(life) == pytest.approx(3600)
    assert growth_bytes(life[:3]) == 0
    assert slope_mib_per_hour(life[:3]) is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "PARTS", [part_of(lambda _: Batch(10, wrong=1, what="an odd byte"), 1000)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    state = ["--state", str(tmp_path / "progress")]
    assert command.main([*state, "--share", "0.02", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["part"], row["count"], row["wanted"], row["wrong"]) == ("made", 20, 20, 2)
    assert command.main(state) == 1
    told = capsys.readouterr().out
    assert '--only made --seed 1"' in told
    assert "an odd byte" in told
    assert command.main([*state, "--only", "made", "--seed", "1"]) == 1
    (tmp_path / "progress").write_text("{}")
    assert command.main(state) == 2


@pytest.fixture
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "CALLS", 30)


@pytest.mark.slow
@pytest.mark.usefixtures("_few_calls")
@pytest.mark.parametrize("kind", range(4), ids=lambda kind: operations.KINDS[kind])
def test_operations_on_a_sound_tier(tmp_path: Path, kind: int) -> None:
    assert operate(tmp_path, kind).wrong == 0


def operate(folder: Path, seed: int) -> Batch:
    """Do a batch of calls to a tier on disk."""
    storage = operations.Storage(folder, 0, 0, ())
    return operations.call(storage, seed)


@pytest.mark.slow
@pytest.mark.usefixtures("_few_calls")
@pytest.mark.parametrize("defect", ["wrong bytes", "no removal", "lost chunks"])
def test_operations_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    def read(self: ChunkIO, *args: Any) -> Any:
        damage = real_read(self, *args)
        args[1].array[0] ^= 1
        return damage

    real_read, real_put = ChunkIO.read, DiskTier.put

    def put(self: DiskTier, transfers: Any) -> Any:
        outcomes = real_put(self, transfers)
        for transfer in transfers[:1]:
            self._chunks.recycle(transfer.ref)
        return outcomes

    def remove(_: DiskTier, __: list[ChunkRef]) -> None:
        pass

    defects: dict[str, tuple[type, str, Callable[..., Any]]] = {
        "wrong bytes": (ChunkIO, "read", read),
        "no removal": (DiskTier, "remove", remove),
        "lost chunks": (DiskTier, "put", put),
    }
    monkeypatch.setattr(*defects[defect])
    if defect == "wrong bytes":
        assert operate(tmp_path, 0).wrong
    else:
        with pytest.raises(AssertionError, match=r"there|gone"):
            operate(tmp_path, 0)


SMALL = [
    pytest.param(messages, {"MESSAGES": 400}, 1, id="messages"),
    pytest.param(requests, {"REQUESTS": 180}, 1, id="requests"),
    pytest.param(killed, {"KILLS": 2}, 1, id="kills"),
    pytest.param(clients, {"SECONDS": 4, "PROCESSES": 2, "THREADS": 2}, 1, id="clients"),
    pytest.param(operations, {"CALLS": 30}, operations.KINDS.index("server"), id="server"),
    pytest.param(operations, {"CALLS": 30}, operations.KINDS.index("redis"), id="redis"),
]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("module", "sizes", "seed"), SMALL)
def test_a_small_batch(module: ModuleType, sizes: dict[str, int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    tally = course.once(module.PART, seed)
    assert (tally.wrong, tally.failed, tally.failures) == (0, 0, [])
    assert tally.count or module is killed, "two kills may both be between two stores"


class TestParsers:
    def test_changed_samples_find_a_defect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parser = PARSERS[0]
        monkeypatch.setattr(images, "read_facts", lambda _: 1 / 0)
        with pytest.raises(parsing.HarmError, match="ZeroDivisionError"):
            parsing.try_mutated(parser, 10, 1)

    @pytest.mark.slow
    @pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
    def test_a_guided_fuzzer_finds_a_planted_defect(self, tmp_path: Path) -> None:
        with pytest.raises(parsing.HarmError, match=r"the planted defect.*kvs!"):
            parsing.fuzz("support.planted", "planted", tmp_path, 1_000_000, 1)
        assert next((tmp_path / "found").iterdir()).read_bytes().startswith(b"kvs!")
        assert parsing.fuzz("support.parsers", "params", tmp_path, 500, 1).count >= 500
