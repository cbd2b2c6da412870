"""The mooncake tier on a stand-in for Mooncake, which a folder tells to hang, fail or die."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import support
from kvstore.tiers import open_tier
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup
from kvstore.tiers.mooncake import calls, session
from support.diskwork import EVEN, MINE

BOUND_S: Final = 30.0  # for anything that must end


class Fake:
    """A folder that tells the stand-in what to do, and tiers that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiers: list[Tier] = []

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def untell(self, word: str) -> None:
        (self.folder / word).unlink()

    def given(self) -> list[int]:
        """Return the bytes that each process gives to the store."""
        return [int(path.read_text()) for path in self.folder.glob("given-*")]

    def open(self, timeout_s: float = 20.0, **options: object) -> Tier:
        """Open a tier with four slots."""
        given = {"url": "mooncake://127.0.0.1:1", "timeout_s": timeout_s, **options}
        self.tiers.append(open_tier("mooncake", TierSetup(MINE, EVEN, UNBOUNDED_BYTES, given)))
        return self.tiers[-1]


@contextmanager
def a_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """Yield a folder, and close the tiers that were opened."""
    monkeypatch.syspath_prepend(str(Path(support.__file__).parent / "fake_mooncake"))
    monkeypatch.setattr(calls, "_MAX_SLOTS", 4)
    monkeypatch.setenv("FAKE_MOONCAKE", str(tmp_path))
    one = Fake(tmp_path)
    yield one
    for word in tmp_path.glob("hang-*"):
        word.unlink()
    for tier in one.tiers:
        tier.close()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def held(tier: Tier) -> int:
    """Return the number of slots that late calls hold."""
    return int(getattr(tier, "held_slots"))  # noqa: B009 - of this tier only


def give_up(tier: Tier, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> object:
    """Make a call whose time is over as soon as it has begun."""
    with monkeypatch.context() as patch:
        wait = session.Session.wait

        def hurry(self: session.Session, future: object, deadline_s: float) -> object:
            is_long = future is not self.ready
            return wait(self, future, time.monotonic() + 0.2 if is_long else deadline_s)  # type: ignore[arg-type]

        patch.setattr(session.Session, "wait", hurry)
        return call()
