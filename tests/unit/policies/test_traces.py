"""Traces: both formats are read, our own is written, and it contains nothing of a prompt."""

from __future__ import annotations

import json
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.policies.recorder import TraceRecorder
from kvstore.policies.traces import Request, read_trace

KEYS = [bytes([number]) * 16 for number in range(5)]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    with closing(TraceRecorder(tmp_path / "trace", 256)) as recorder:
        recorder.record(KEYS[:3], 600, 40)
        recorder.record(KEYS[:2], 512, 40)
        recorder.record([], 0, 40)
    first, second = read_trace(tmp_path / "trace")
    assert (recorder.recorded, recorder.dropped) == (3, 0)
    assert (len(first.keys), first.chunk_tokens, first.tail_tokens) == (3, 256, 88)
    assert (second.keys, second.tail_tokens) == (first.keys[:2], 256)
    assert (first.answer_tokens, second.answer_tokens) == (40, 40)
    assert [first.tokens_of(place) for place in range(3)] == [256, 256, 88]
    assert 0 <= first.time_s <= second.time_s


def test_nobody_can_tell_a_prompt_from_its_trace(tmp_path: Path) -> None:
    for name in "ab":
        with closing(TraceRecorder(tmp_path / name, 256)) as recorder:
            recorder.record(KEYS, 1280, 40)
    texts = [(tmp_path / name).read_text() for name in "ab"]
    assert not any(key.hex() in text for key in KEYS for text in texts)
    assert next(read_trace(tmp_path / "a")).keys != next(read_trace(tmp_path / "b")).keys
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_trace_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("something")
    with pytest.raises(ConfigError, match="File exists"):
        TraceRecorder(tmp_path / "trace", 256)
    assert (tmp_path / "trace").read_text() == "something"


def test_a_full_trace_ends(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", 256, max_bytes=400)
    for _ in range(20):
        recorder.record(KEYS, 1280, 40)
    recorder.record([], 0, 40)
    recorder.close()
    recorder.close()
    recorder.record(KEYS, 1280, 40)
    assert 0 < recorder.recorded == len(list(read_trace(tmp_path / "trace")))
    assert recorder.recorded + recorder.dropped == 22
    assert (tmp_path / "trace").stat().st_size <= 400


def test_a_full_disk_ends_the_trace(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", 256)
    recorder._file.close()
    recorder._file = Path("/dev/full").open("w", encoding="ascii", buffering=1)  # noqa: SIM115
    recorder.record(KEYS, 1280, 40)
    recorder.record(KEYS, 1280, 40)
    recorder.close()
    assert (recorder.recorded, recorder.dropped) == (0, 2)


def test_threads_may_record(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace", 256)

    def record() -> None:
        for _ in range(100):
            recorder.record(KEYS, 1280, 40)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert len(list(read_trace(tmp_path / "trace"))) == recorder.recorded == 400


def test_mooncake_format(tmp_path: Path) -> None:
    line = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 46]}
    (found,) = read_trace(write(tmp_path / "trace", line, {**line, "hash_ids": []}))
    keys = tuple(number.to_bytes(8, "little") for number in (0, 1, 46))
    assert found == Request(1.5, keys, 512, 1100 - 1024, 1100, 7)


HEADER = {"format": "kvstore-trace", "version": 1, "chunk_tokens": 256}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["text"], "line 1 is not a request"),
        ([{"timestamp": 1, "input_length": 5}], "line 1 .*'hash_ids' is missing"),
        ([{**HEADER, "version": 3}], "line 1 .*version is 3: this release reads 1 and 2"),
        ([{**HEADER, "chunk_tokens": 0}], "line 1 .*chunk_tokens is 0"),
        ([HEADER, {"time_s": 0, "num_tokens": 1, "keys": ["xy"]}], "line 2 is not a request"),
        ([{**HEADER, "chunk_tokens": 10**310}], "line 1 .*at most 1,073,741,824"),
        ([HEADER, {"time_s": 0, "num_tokens": 1, "keys": ["00"], "session": "\ud800"}], "line 2 .*surrogates"),
        ([{"timestamp": 1, "input_length": 5, "hash_ids": [1], "session": "\ud800"}], "line 1 .*surrogates"),
        ([HEADER, [1, 2]], "line 2 is not a request"),
        ([{"timestamp": 1, "input_length": 5, "hash_ids": [-1]}], "line 1 is not a request"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, lines: list[object], message: str) -> None:
    path = write(tmp_path / "trace", *lines)
    with pytest.raises(ConfigError, match=message):
        list(read_trace(path))


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_trace(tmp_path / "none"))
