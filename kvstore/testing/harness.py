"""Access of the tests to a tier and to the storage behind it: hooks to fill in, and shorthands for common calls."""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from kvstore.model.chunks import ByteArray, ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import ALIGNMENT_BYTES, KVLayout, round_up
from kvstore.tiers.base import UNBOUNDED_BYTES, BoundedTier, Tier, TierSetup, Transfer

MINE = Namespace({"model": "conformance"})
OTHER = Namespace({"model": "another"})
EVEN = KVLayout(page_bytes=(1024, 1024), planes=1, block_tokens=16, chunk_tokens=64)
ODD = KVLayout(page_bytes=(1000, 36, 1000), planes=2, block_tokens=16, chunk_tokens=64)
LARGE = KVLayout(page_bytes=(16384,) * 2, planes=2, block_tokens=32, chunk_tokens=128)
DEEP = KVLayout(page_bytes=(24,) * 260, planes=1, block_tokens=16, chunk_tokens=32)
TINY = KVLayout(page_bytes=(1,), planes=1, block_tokens=16, chunk_tokens=16)
LAYOUTS = {"even": EVEN, "odd": ODD, "large": LARGE, "deep": DEEP, "tiny": TINY}
FEW_CHUNKS = 6  # divisible by two and three parts, so that exactly these chunks fit
_ROOMY_CHUNKS = 64
_UNTOUCHED = 0xA5


class TierHarness(ABC):
    """One storage place, and the tier that is opened over it.

    A subclass fills in the hooks. The raw ones bypass the tier, so that it cannot vouch for itself. They are asked
    about chunks of the namespace ``MINE`` only, while no call is under way.

    Attributes:
        persistent: True if a tier opened again over the same folder finds its chunks.
        checks_bytes: True if the tier notices that its storage was changed behind its back. Then ``raw_write`` and
            ``raw_remove`` are needed.
        keeps_trails: True if the tier keeps the trails of chunks, for lookups of other engines.
        exact_sizes: True if a chunk takes at least the bytes of its payload; False with a codec.
        equal_bytes: True if two writes of a chunk are stored as the same bytes; False with encryption.
        empty_is_absent: True if a value without a byte counts as none, since the storage leaves one when a writer dies.
        folder: an empty folder for this harness alone.
    """

    persistent: ClassVar[bool] = False
    checks_bytes: ClassVar[bool] = False
    keeps_trails: ClassVar[bool] = False
    exact_sizes: ClassVar[bool] = True
    equal_bytes: ClassVar[bool] = True
    empty_is_absent: ClassVar[bool] = False
    folder: Path
    tier: Tier
    layout: KVLayout
    _setup: TierSetup
    _is_started = False

    @abstractmethod
    def open_tier(self, setup: TierSetup) -> Tier:
        """Open the tier over the storage of this harness; a call after a close is a restart."""

    @abstractmethod
    def raw_read(self, ref: ChunkRef) -> bytes | None:
        """Return the bytes that the storage holds for a chunk, headers included; None if it holds none."""

    @abstractmethod
    def raw_used_bytes(self) -> int:
        """Return the bytes that the storage really holds."""

    @staticmethod
    def with_options(setup: TierSetup, **options: object) -> TierSetup:
        """Return the setup with options of this kind of tier, for ``open_tier``."""
        return replace(setup, options={**setup.options, **options})

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        """Replace the stored bytes of a chunk that is held."""
        raise NotImplementedError

    def raw_remove(self, ref: ChunkRef) -> None:
        """Delete the stored bytes of a chunk that is held."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _storage(self, tmp_path: Path) -> Iterator[None]:
        """Use a fresh folder for each test, and close the last tier at its end."""
        self.begin(tmp_path)
        yield
        self.stop()

    def begin(self, folder: Path) -> None:
        """Use an empty folder from now on."""
        self.folder = folder
        self._named: dict[ChunkRef, None] = {}  # every chunk that was put

    def start(self, layout: KVLayout = EVEN, *, chunks: int = _ROOMY_CHUNKS, namespace: Namespace = MINE) -> Tier:
        """Open a tier, or open it again; if it has a bound, with room for ``chunks`` full chunks."""
        self.stop()
        return self._open(TierSetup(namespace, layout, self._room_bytes(layout, chunks)))

    def _room_bytes(self, layout: KVLayout, chunks: int) -> int:  # noqa: ARG002 - where there is a bound
        return UNBOUNDED_BYTES

    def _open(self, setup: TierSetup) -> Tier:
        self._setup = setup
        self.layout = setup.layout
        self.tier = self.open_tier(setup)
        self._is_started = True
        return self.tier

    def stop(self) -> None:
        """Close the tier, if one is open."""
        if self._is_started:
            self._is_started = False
            self.tier.close()

    def restart(self) -> Tier:
        """Close the tier and open one with the same geometry and bound."""
        self.stop()
        return self._open(replace(self._setup, namespace=MINE))

    def put(self, *refs: ChunkRef, version: int = 0) -> list[Outcome]:
        """Store the chunks in one batch."""
        return self.put_all([make_transfer(self.layout, ref, version) for ref in refs])

    def put_all(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Store a batch of transfers."""
        self._named.update(dict.fromkeys(transfer.ref for transfer in transfers))
        return self.tier.put(transfers)

    def get(self, *refs: ChunkRef, version: int = 0) -> list[Outcome]:
        """Read the chunks in one batch; a hit must have the right bytes."""
        transfers = [Transfer(ref, make_buffer(self.layout.slot_bytes)) for ref in refs]
        outcomes = self.tier.get(transfers)
        for outcome, (ref, buffer, *_) in zip(outcomes, transfers, strict=True):
            if outcome is Outcome.HIT:
                payload = make_payload(self.layout, ref, version)
                assert buffer[: len(payload)].tobytes() == payload, f"the wrong bytes of {ref}"
        return outcomes

    def held(self) -> set[ChunkRef]:
        """Return the chunks that the tier says it holds, of all that were put."""
        named = list(self._named)
        return {ref for ref, is_held in zip(named, self.tier.contains(named), strict=True) if is_held}

    def check_bytes(self) -> None:
        """Check that no bytes are left if all chunks are gone."""
        assert self.held() or not self.raw_used_bytes()

    def check_bound(self) -> None:  # noqa: B027 - where there is a bound
        """Check that a tier keeps to its bound, if it has one. May be called while calls are under way."""

    def only_if_persistent(self) -> None:
        """Skip a test of chunks that outlive their tier."""
        if not self.persistent:
            pytest.skip("this tier does not outlive its process")

    def only_if_bytes_are_checked(self) -> None:
        """Skip a test of damage to the storage."""
        if not self.checks_bytes:
            pytest.skip("this tier does not check its bytes")

    def put_answers(
        self,
        ref: ChunkRef,  # noqa: ARG002 - where there is a bound
        held: Collection[ChunkRef],  # noqa: ARG002
        batch: Iterable[ChunkRef] = (),  # noqa: ARG002
    ) -> set[Outcome]:
        """Return the outcomes that a tier with the chunks ``held`` may give to one chunk of a batch of puts."""
        return {Outcome.STORED}


class BoundedHarness(TierHarness):
    """Harness of tiers that keep to a bound.

    Attributes:
        pause_s: time between touches beyond which ``scan`` must order chunks by them. It may order closer touches
            otherwise, with heads of prompts after their tails, or because the storage has coarse times.
        exact_sizes: True if a chunk takes all the bytes of ``stored_bytes``; False with a codec.
    """

    pause_s: ClassVar[float] = 1.1

    @property
    def bounded(self) -> BoundedTier:
        """Tier under test."""
        assert isinstance(self.tier, BoundedTier)
        return self.tier

    def start_bounded(self, layout: KVLayout = EVEN, *, chunks: int = _ROOMY_CHUNKS) -> BoundedTier:
        """Start as ``start`` does, and return the tier with its bounded type."""
        self.start(layout, chunks=chunks)
        return self.bounded

    def only_with_exact_sizes(self) -> None:
        """Skip a test that fills a tier by numbers of chunks."""
        if not self.exact_sizes:
            pytest.skip("the contents decide how many chunks this tier holds")

    def _room_bytes(self, layout: KVLayout, chunks: int) -> int:
        roomy_bytes = _ROOMY_CHUNKS * 2 * (layout.slot_bytes + ALIGNMENT_BYTES)
        if chunks == _ROOMY_CHUNKS:
            return roomy_bytes
        self._open(TierSetup(MINE, layout, roomy_bytes))  # only to find the bytes of a chunk
        chunk_bytes = self.bounded.stored_bytes(layout.blocks_per_chunk)
        self.stop()
        return chunks * chunk_bytes

    def _open(self, setup: TierSetup) -> Tier:
        tier = super()._open(setup)
        self.bounded.scan()
        return tier

    def held(self) -> set[ChunkRef]:
        """Return the chunks that the tier says it holds, and check that it names each once."""
        refs = [ref for ref, _ in self.bounded.scan()]
        assert len(refs) == len(set(refs))
        return set(refs)

    def check_bytes(self) -> None:
        """Compare the tier's used bytes with those in its storage."""
        self.check_bound()
        assert self.bounded.used_bytes == self.raw_used_bytes()
        assert self.bounded.used_bytes >= sum(size for _, size in self.bounded.scan())

    def check_bound(self) -> None:
        """Check that the tier keeps to its bound."""
        assert self.bounded.used_bytes <= self.bounded.capacity_bytes

    def put_answers(self, ref: ChunkRef, held: Collection[ChunkRef], batch: Iterable[ChunkRef] = ()) -> set[Outcome]:
        """Return the outcomes it may give; a tier of several parts may store other chunks of the batch first."""
        if ref in held:
            return {Outcome.STORED}
        answers = self._answers(ref, held)
        if self.bounded.usable_bytes < self.bounded.capacity_bytes:
            answers |= self._answers(ref, {*held, *batch})
        return answers

    def _answers(self, ref: ChunkRef, held: Iterable[ChunkRef]) -> set[Outcome]:
        tier = self.bounded
        need_bytes = tier.stored_bytes(ref.num_blocks) + sum(tier.size_of(other) for other in {*held} - {ref})
        if need_bytes <= tier.usable_bytes:
            return {Outcome.STORED}
        is_certain = need_bytes > tier.capacity_bytes and self.exact_sizes
        return {Outcome.FULL} if is_certain else {Outcome.STORED, Outcome.FULL}


def make_ref(number: int, num_blocks: int = 4) -> ChunkRef:
    """Return a chunk's name, derived from a number below 65,536."""
    return ChunkRef(number.to_bytes(2, "little") * 8, num_blocks)


def make_payload(layout: KVLayout, ref: ChunkRef, version: int = 0) -> bytes:
    """Return bytes derived from the chunk's name, so that those of another chunk are recognised."""
    seed = f"{ref.prefix_key.hex()} {ref.num_blocks} {version}"
    return random.Random(seed).randbytes(layout.payload_bytes(ref.num_blocks))  # noqa: S311 - not a secret


def make_buffer(size_bytes: int, *, shift_bytes: int = 0) -> ByteArray:
    """Return a buffer ``shift_bytes`` past an address divisible by 4096, filled with a conspicuous byte."""
    end = shift_bytes + size_bytes
    room = np.frombuffer(mmap.mmap(-1, max(round_up(end, ALIGNMENT_BYTES), ALIGNMENT_BYTES)), np.uint8)
    buffer: ByteArray = room[shift_bytes:end]
    buffer[:] = _UNTOUCHED
    return buffer


def make_transfer(layout: KVLayout, ref: ChunkRef, version: int = 0, *, shift_bytes: int = 0) -> Transfer:
    """Return a transfer of a slot with the payload of ``ref``, followed by dirty bytes."""
    buffer = make_buffer(layout.slot_bytes, shift_bytes=shift_bytes)
    payload = make_payload(layout, ref, version)
    buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
    return Transfer(ref, buffer)


def is_untouched(buffer: ByteArray) -> bool:
    """Tell if none of these bytes of a new buffer was written."""
    return bool((buffer == _UNTOUCHED).all())
