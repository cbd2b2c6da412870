"""Course of a soak: batches of one part after the other, until it has enough, or its time is over."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from soak.memory import growth_bytes
from soak.part import Batch, Do, Part
from soak.progress import Progress, Tally

ERRORS: Final = (Exception, pytest.fail.Exception, pytest.skip.Exception)  # pytest's are no ``Exception``
Tell = Callable[[Part, Tally], None]


def run(part: Part, progress: Progress, wanted: int, limit_s: float, tell: Tell) -> None:
    """Do batches of a part until it has ``wanted`` things, its time is over, or it has failed too often.

    A part that has started does one batch at least, so that short runs go on, too.
    """
    tally = progress.of(part.name)
    end_s = time.monotonic() + limit_s

    def goes_on() -> bool:
        return tally.count < wanted and time.monotonic() < end_s and not tally.is_hopeless

    while goes_on():
        try:
            with _opened(part) as do:
                tally.begin_life()
                begin_s = time.monotonic()
                is_sound = True
                while is_sound:
                    is_sound = step(part, tally, do, progress.first_seed + tally.batches, begin_s) and goes_on()
                    progress.save()
                    tell(part, tally)
        except ERRORS as error:  # of its start or its end
            tally.fail(progress.first_seed + tally.batches, f"around the batches: {_told(error)}")
            progress.save()
            tell(part, tally)


def step(part: Part, tally: Tally, do: Do, seed: int, life_begin_s: float) -> bool:
    """Do one batch, and count it; False after a failure."""
    begin_s = time.monotonic()
    num_bad = tally.wrong + tally.failed
    try:
        batch = do(seed)
    except ERRORS as error:
        tally.fail(seed, _told(error))
    else:
        _count(tally, batch, seed)
        _watch(part, tally, batch, seed, begin_s - life_begin_s, time.monotonic() - begin_s)
    tally.seconds += time.monotonic() - begin_s
    tally.batches += 1
    return tally.wrong + tally.failed == num_bad


def once(part: Part, seed: int) -> Tally:
    """Do the batch of one seed, to repeat a failure."""
    tally = Tally(memory=[[]])
    with _opened(part) as do:
        step(part, tally, do, seed, time.monotonic())
    return tally


@contextmanager
def _opened(part: Part) -> Iterator[Do]:
    with TemporaryDirectory(prefix="kvs-soak-", ignore_cleanup_errors=True) as folder, part.open(Path(folder)) as do:
        yield do


def _count(tally: Tally, batch: Batch, seed: int) -> None:
    tally.count += batch.count
    for name, number in batch.notes.items():
        tally.notes[name] = tally.notes.get(name, 0) + number
    if batch.wrong:
        tally.wrong += batch.wrong
        tally.keep(seed, batch.what)


def _watch(part: Part, tally: Tally, batch: Batch, seed: int, since_s: float, took_s: float) -> None:
    """Note the memory that a batch has sampled at equal intervals; growth is a failure."""
    for number, size in enumerate(batch.memory, 1):
        tally.sample(since_s + took_s * number / len(batch.memory), size)
    grown_bytes = growth_bytes(tally.memory[-1])
    if grown_bytes > part.memory_growth_bytes:
        tally.fail(seed, f"the server's memory grows: {grown_bytes >> 20} MiB from the first half to the second")


def _told(error: BaseException) -> str:
    """Return an error in one line: its message, and the innermost places of its trace."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]} ({places})"
