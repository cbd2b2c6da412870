"""Any order of servers that come, go and fail, of stores, reads, removals and clears: nothing removed is read again.

Bytes of a chunk change with each removal, so that one that returns shows by its bytes.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.members import Cluster
from support.schedules import schedule_settings

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.errors import TierError
from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, MINE, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.guards import CircuitBreaker
from kvstore.tiers.members import tier as members_tier
from kvstore.tiers.members.addresses import Member, Members
from kvstore.tiers.members.tier import MembersTier
from kvstore.tiers.server.tier import ServerTier

_SERVERS = range(3)
_REFS = [make_ref(number) for number in range(6)]
_SOME = st.sets(st.sampled_from(_REFS), min_size=1).map(sorted)
_SETS = st.sets(st.sampled_from(_SERVERS), min_size=1)


class MembersMachine(RuleBasedStateMachine):
    """Two engines over three servers with disks. Only the first one removes and clears; both may know other servers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvstore-")
        self.cluster = Cluster(Path(self.folder.name), len(_SERVERS))
        self.running = set(_SERVERS)
        self.versions = dict.fromkeys(_REFS, 0)
        self.stored: set[ChunkRef] = set()  # in their current version
        self.epoch = 0
        self.engines: list[MembersTier] = []

    @initialize(disks=st.sets(st.sampled_from(_SERVERS)), keeps_names=st.booleans(), most=st.sampled_from([3, 65_536]))
    def open(self, disks: set[int], keeps_names: bool, most: int) -> None:
        for number in disks:
            self.cluster.give_disk(number)
        members_tier._MAX_REMOVED = most  # type: ignore[misc]
        source = Members(list, "", keeps_names=keeps_names)
        self.engines = [MembersTier(source, self._open_member, MINE, EVEN) for _ in range(2)]
        for engine in self.engines:
            self.change(engine, set(_SERVERS))
        self.store(0)

    def _open_member(self, member: Member, namespace: Namespace) -> Tier:
        options = {"url": member.url, "timeout_s": 0.1}
        opened = ServerTier.open(TierSetup(namespace, EVEN, UNBOUNDED_BYTES, options))
        return CircuitBreaker(opened, 1, 0.0, asks_storage=True)

    def change(self, engine: MembersTier, numbers: set[int]) -> None:
        engine._change([Member(f"kvs-{number}", f"kvs://{self.cluster.names[number]}") for number in sorted(numbers)])

    def teardown(self) -> None:
        for engine in self.engines:
            engine.close()
        self.cluster.close()
        self.folder.cleanup()

    @rule(engine=st.sampled_from([0, 1]), numbers=_SETS)
    def know(self, engine: int, numbers: set[int]) -> None:
        self.change(self.engines[engine], numbers)

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        self.cluster.end(number)
        self.running.discard(number)

    @precondition(lambda self: len(self.running) < len(_SERVERS))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(_SERVERS) - self.running)))
        self.cluster.begin(number)
        self.running.add(number)

    @rule(engine=st.sampled_from([0, 1]))
    def catch_up(self, engine: int) -> None:
        """Do what the thread does."""
        for member in self.engines[engine]._members:
            with suppress(TierError):
                member.tier.contains(_REFS[:1])
            self.engines[engine]._settle(member)

    @rule(engine=st.sampled_from([0, 0, 1]))
    def store(self, engine: int) -> None:
        if engine and self.epoch:
            return  # it has other weights now, and stores what the first one does not find
        transfers = [make_transfer(EVEN, ref, self.versions[ref]) for ref in _REFS]
        outcomes = self.engines[engine].put(transfers)
        assert set(outcomes) <= {Outcome.STORED, Outcome.FAILED}
        self.stored |= {ref for ref, outcome in zip(_REFS, outcomes, strict=True) if outcome is Outcome.STORED}

    @invariant()
    def nothing_removed_is_found(self) -> None:
        if not self.engines:
            return
        found = zip(_REFS, self.engines[0].look(_REFS), strict=True)
        assert {ref for ref, presence in found if presence} <= self.stored
        transfers = [Transfer(ref, make_buffer(EVEN.slot_bytes)) for ref in _REFS]
        for outcome, (ref, buffer, *_) in zip(self.engines[0].get(transfers), transfers, strict=True):
            assert outcome in {Outcome.HIT, Outcome.MISS, Outcome.FAILED}
            if outcome is Outcome.HIT:
                payload = np.frombuffer(make_payload(EVEN, ref, self.versions[ref]), np.uint8)
                assert (buffer[: len(payload)] == payload).all(), f"{ref} was removed"

    @rule(refs=_SOME)
    def remove(self, refs: list[ChunkRef]) -> None:
        self.engines[0].remove(refs)
        self._forget(refs)

    @rule()
    def clear(self) -> None:
        with suppress(TierError):  # a server is down
            self.engines[0].clear()
        self._forget(_REFS)

    @rule()
    def reset(self) -> None:
        self.epoch += 1
        with suppress(TierError):
            self.engines[0].reset(MINE.at_epoch(str(self.epoch)))
        self._forget(_REFS)

    def _forget(self, refs: list[ChunkRef]) -> None:
        for ref in refs:
            self.versions[ref] += 1
        self.stored -= set(refs)


@pytest.mark.schedules
def test_nothing_removed_is_read_again_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_tier, "_MAX_REMOVED", 65_536)  # the machine changes it
    monkeypatch.setattr(members_tier, "_INTERVAL_S", (3600.0, 3600.0))
    run_state_machine_as_test(MembersMachine, settings=schedule_settings(4, stateful_step_count=25))
