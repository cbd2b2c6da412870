"""Limit of every GPU path: plain copies between device memory and pinned host memory, each way and both at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from kvstore.tools.bench.gpu.figures import Figure, speed
from kvstore.tools.bench.gpu.scale import Scale
from kvstore.tools.bench.limits import MEMCPY_PIECE_BYTES
from kvstore.tools.bench.samples import WARM_UP_ROUNDS, Limit, paired

_PIECES_BYTES = tuple(1 << power for power in (16, 18, 20, 22))  # and MEMCPY_PIECE_BYTES, the limit itself
Pieces = list[tuple[torch.Tensor, torch.Tensor]]


class PinnedCopies:
    """Copies of ``size_bytes`` in pieces. Host memory is pinned if the device is a GPU.

    Args:
        size_bytes: bytes of one direction.
        device: device to copy to and from.
        piece_bytes: bytes copied by one call.
    """

    def __init__(self, size_bytes: int, device: torch.device, piece_bytes: int = MEMCPY_PIECE_BYTES) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._out, self._in = (self._pieces(size_bytes, piece_bytes) for _ in range(2))  # they share no byte
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._is_cuda else []  # type: ignore[no-untyped-call]

    def to_host(self) -> None:
        """Copy from the device."""
        self._launch_out()
        self._wait()

    def to_device(self) -> None:
        """Copy to the device."""
        self._launch_in()
        self._wait()

    def both_ways(self) -> None:
        """Copy the whole size each way, at once."""
        with self._on(0):
            self._launch_out()
        with self._on(1):
            self._launch_in()
        self._wait()

    def _pieces(self, size_bytes: int, piece_bytes: int) -> Pieces:
        on_device = torch.ones(size_bytes, dtype=torch.uint8, device=self._device)
        on_host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        ranges = [slice(begin, begin + piece_bytes) for begin in range(0, size_bytes, piece_bytes)]
        return [(on_device[piece], on_host[piece]) for piece in ranges]

    def _launch_out(self) -> None:
        for on_device, on_host in self._out:
            on_host.copy_(on_device, non_blocking=True)

    def _launch_in(self) -> None:
        for on_device, on_host in self._in:
            on_device.copy_(on_host, non_blocking=True)

    def _on(self, number: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[number]) if self._is_cuda else nullcontext()

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def measure_limit(scale: Scale) -> Iterator[Figure]:
    """Measure copies in smaller pieces, and both ways at once, against copies in one direction in pieces of 32 MiB."""
    whole = PinnedCopies(scale.batch_bytes, scale.device)
    measure = partial(_measure, scale)
    yield measure("out", whole.to_host, whole.to_host, scale.batch_bytes)
    yield measure("in", whole.to_device, whole.to_device, scale.batch_bytes)

    def one_after_the_other() -> None:
        whole.to_host()
        whole.to_device()

    yield measure(
        "both at once, against one after the other", whole.both_ways, one_after_the_other, 2 * scale.batch_bytes
    )
    for piece_bytes in _PIECES_BYTES:
        copies = PinnedCopies(scale.batch_bytes, scale.device, piece_bytes)
        title = f"in pieces of {piece_bytes >> 10} KiB"
        yield measure(f"out {title}", copies.to_host, whole.to_host, scale.batch_bytes)
        yield measure(f"in {title}", copies.to_device, whole.to_device, scale.batch_bytes)


def _measure(scale: Scale, name: str, path: Limit, limit: Limit, size_bytes: int) -> Figure:
    rounds = range(WARM_UP_ROUNDS + scale.rounds)
    pairs = [paired(limit, path, limit_first=number % 2 == 0)[0] for number in rounds]
    return speed(f"pinned copy {name}", pairs[WARM_UP_ROUNDS:], size_bytes)
