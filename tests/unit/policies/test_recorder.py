"""Recorder of traces: lookups and events are read back, callers wait for no disk, and hostile ids stay small."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.gate import HANG_GUARD_S

from kvstore.model.history import Cause, ChunkEvent, Fate
from kvstore.policies import recorder as module
from kvstore.policies.recorder import TraceRecorder
from kvstore.policies.traces import Begin, LookedUp, Request, Tiers, Timed, read_records, read_trace

KEYS = [bytes([number]) * 16 for number in range(1, 6)]
TIERS = Tiers(slots=4, slot_bytes=1 << 20, disk_bytes=0, chunk_bytes=0, keeps_in_memory=True, has_remote=False)


def told(path: Path, kind: type[Any]) -> list[Any]:
    """Return what a trace says besides requests, of one kind."""
    return [record.what for record in read_records(path) if isinstance(record, Timed) and isinstance(record.what, kind)]


def test_lookups_and_events_are_read_back(tmp_path: Path) -> None:
    """The same key has the same name in all kinds of lines, and its own bytes are nowhere."""
    looked_up = LookedUp("cmpl-a", 600, 16, 272, {"memory": 256}, "evicted", KEYS[:2], ["skip_save"])
    with closing(TraceRecorder(tmp_path / "trace", 256)) as recorder:
        recorder.note(TIERS)
        recorder.note(looked_up)
        recorder.record(KEYS[:2], 512, 7, "cmpl-a")
        recorder.note(ChunkEvent(Fate.EVICTED, KEYS[0], KEYS[1], "memory", Cause.NONE, KEYS[2]))
        recorder.note(ChunkEvent(Fate.REMOVED, cause=Cause.CLEARED))
    begin, *_ = read_records(tmp_path / "trace")
    assert isinstance(begin, Begin)
    assert (begin.chunk_tokens, begin.has_reasons, begin.start_s > 1e9) == (256, True, True)
    (request,) = read_trace(tmp_path / "trace")
    assert (request.request_id, request.answer_tokens) == ("cmpl-a", 7)
    assert told(tmp_path / "trace", Tiers) == [TIERS]
    assert told(tmp_path / "trace", LookedUp) == [looked_up._replace(missing=request.keys, notes=("skip_save",))]
    evicted, removed = told(tmp_path / "trace", ChunkEvent)
    assert (evicted.fate, evicted.place, evicted.key, evicted.first_key) == (Fate.EVICTED, "memory", *request.keys)
    assert evicted.newcomer not in {b"", *request.keys}
    assert removed == ChunkEvent(Fate.REMOVED, cause=Cause.CLEARED)
    text = (tmp_path / "trace").read_text()
    assert not any(key.hex() in text for key in KEYS)


def test_neighbouring_events_share_a_line(tmp_path: Path) -> None:
    with closing(TraceRecorder(tmp_path / "trace", 256)) as recorder:
        recorder._start_s += 1000  # or the clock may tick between two of them
        for key in KEYS:
            recorder._put(ChunkEvent(Fate.STORED, key, b"", "memory"))
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert sum(len(line.get("chunks", ())) for line in lines) == len(KEYS)
    assert len(lines) <= 1 + 2
    assert len({event.key for event in told(tmp_path / "trace", ChunkEvent)}) == len(KEYS)


def test_an_id_stays_small(tmp_path: Path) -> None:
    """A client may choose it."""
    with closing(TraceRecorder(tmp_path / "trace", 256)) as recorder:
        recorder.record(KEYS, 1280, 0, "x" * 100_000)
        recorder.note(LookedUp("\x1b[2J\u202e" * 100_000, 1, 0, 0, {}))
    assert (tmp_path / "trace").stat().st_size < 10_000


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_line_that_is_still_written_is_left_out(tmp_path: Path, cut: int) -> None:
    with closing(TraceRecorder(tmp_path / "trace", 256)) as recorder:
        for _ in range(2):
            recorder.record(KEYS, 1280, 40, "a")
    whole = (tmp_path / "trace").read_text()
    (tmp_path / "trace").write_text(whole[: -cut - 1])
    assert [type(record) for record in read_records(tmp_path / "trace")] == [Begin, Request]


def test_a_line_of_a_later_release_is_left_out(tmp_path: Path) -> None:
    TraceRecorder(tmp_path / "trace", 256).close()
    with (tmp_path / "trace").open("a") as file:
        file.write('{"time_s":1,"weather":"fair"}\n{"time_s":1,"event":"melted","chunks":[["ab"]]}\n')
        file.write('{"time_s":1,"event":"lost","cause":"heat","chunks":[["ab"]]}\n')
    assert told(tmp_path / "trace", object) == [ChunkEvent(Fate.LOST, b"\xab")]


class StuckFile:
    """File whose writes wait until the disk moves again."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.moves, self.is_reached = inner, threading.Event(), threading.Event()

    def writelines(self, lines: list[str]) -> None:
        self.is_reached.set()
        assert self.moves.wait(HANG_GUARD_S)
        self.inner.writelines(lines)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def stuck(tmp_path: Path) -> Any:
    recorder = TraceRecorder(tmp_path / "trace", 256)
    file: Any = StuckFile(recorder._file)
    recorder._file = file
    yield recorder
    file.moves.set()
    recorder.close()


def test_a_disk_that_stands_still_ends_the_trace(
    stuck: TraceRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers never wait, and the queue is bounded."""
    monkeypatch.setattr(module, "MAX_QUEUED", 4)
    stuck.record(KEYS, 1280, 40)
    file: Any = stuck._file
    assert file.is_reached.wait(HANG_GUARD_S)
    for _ in range(10):
        stuck.record(KEYS, 1280, 40)
    assert stuck._queue.qsize() == 4
    file.moves.set()
    stuck.close()
    assert (stuck.recorded, stuck.dropped) == (5, 6)
    assert len(list(read_trace(tmp_path / "trace"))) == 5
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_disk_that_hangs_does_not_keep_the_engine(stuck: TraceRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END_WAIT_S", 0.01)
    stuck.record(KEYS, 1280, 40)
    stuck.close()
    assert stuck._thread is not None
    assert stuck._thread.is_alive()
    assert stuck._thread.daemon
    file: Any = stuck._file
    file.moves.set()
    stuck._thread.join(HANG_GUARD_S)
    assert not stuck._thread.is_alive()
