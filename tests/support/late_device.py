"""A device on a CPU that does things as late, and in as mixed an order, as CUDA allows.

Launched work waits in its stream. The device takes it from the streams at random, in order within each, and holds
back work that waits for an event. It runs while the host waits for it, and now and then at a launch. Work that is not
ordered gives other bytes than the same calls carried out one after the other.

Work is a closure, which reads the host's memory when it runs and not when it is launched, as a copy does.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from kvstore.paged.binding import bind_paged_kv
from kvstore.paged.device import DevicePagedKV
from kvstore.paged.planes import LayerCache, find_planes
from kvstore.paged.streams import Direction, Streams, Work

CPU = torch.device("cpu")
CAPTURE_ERROR = "CUDA error 900: operation not permitted when stream is capturing"


class LateStream:
    """Work of one stream that was launched and not yet done."""

    def __init__(self, device: LateDevice, number: int) -> None:
        self.device = device
        self.number = number
        self.launched = 0
        self.done = 0
        self.speed = device.draw_speed()
        self.done_at: dict[int, int] = {0: 0}  # the device's clock when each piece was done
        self._work: deque[Work | LateEvent] = deque()

    def launch(self, work: Work) -> None:
        """Launch work on this stream."""
        with self.device.lock:
            self._work.append(work)
            self.launched += 1
            self.device.run_at_random()

    def hold(self, event: LateEvent | None) -> None:
        """Run all later work after ``event``."""
        if event is not None:
            with self.device.lock:
                self._work.append(event)
                self.launched += 1

    def now(self) -> LateEvent:
        """Return the event at which all work launched so far is done."""
        return LateEvent(self, self.launched)

    @property
    def can_go_on(self) -> bool:
        """True if it has work that waits for nothing."""
        return bool(self._work) and (not isinstance(self._work[0], LateEvent) or self._work[0].is_reached)

    def do_next(self) -> None:
        """Do one piece of work."""
        work = self._work.popleft()
        if not isinstance(work, LateEvent):
            work()
        self.done += 1
        self.done_at[self.done] = self.device.clock

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.device.run_until(lambda: not self._work)


class LateEvent:
    """A position in the work of a stream."""

    def __init__(self, stream: LateStream, place: int) -> None:
        self.stream = stream
        self.place = place

    @property
    def is_reached(self) -> bool:
        """True if all work before it is done."""
        return self.stream.done >= self.place


class Failure(NamedTuple):
    """Error that a launch raises, instead of launching its work or while that is under way."""

    error: BaseException
    is_under_way: bool = False


class LateDevice:
    """Streams, memory, and a current stream for each thread.

    Args:
        seed: of everything random.
        size_bytes: of its memory.
        eagerness: the probability that a launch lets it work.
        is_uneven: some streams get less done than others.
    """

    def __init__(
        self, seed: int, size_bytes: int = 1 << 24, eagerness: float = 0.2, *, is_uneven: bool = False
    ) -> None:
        self.dice = random.Random(seed)
        self.lock = threading.RLock()
        self.clock = 0
        self.stalled: list[LateStream] = []
        self.counts: Counter[str] = Counter()  # of the calls to its LateStreams
        self.failures: deque[Failure | None] = deque()  # of the next launches, one each
        self.memory = Arena(size_bytes)
        self.is_capturing = False
        self._eagerness = eagerness
        self._speeds = (0.001, 0.05, 1.0) if is_uneven else (1.0,)
        self._streams: list[LateStream] = []
        self._current: dict[int, LateStream] = {}

    def draw_speed(self) -> float:
        """Draw the share of the work that a stream gets done, relative to the others."""
        return self.dice.choice(self._speeds) if len(self._speeds) > 1 else 1.0

    def make_stream(self) -> LateStream:
        """Make one more stream."""
        with self.lock:
            self._streams.append(LateStream(self, len(self._streams)))
            return self._streams[-1]

    @property
    def current(self) -> LateStream:
        """The calling thread's stream; each thread begins with a separate one."""
        with self.lock:
            thread = threading.get_ident()
            if thread not in self._current:
                self._current[thread] = self.make_stream()
            return self._current[thread]

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        """Make ``stream`` the calling thread's."""
        thread, former = threading.get_ident(), self.current
        self._current[thread] = stream
        try:
            yield
        finally:
            self._current[thread] = former

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Refuse calls that could upset a capture, as while a graph is captured."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    def check_capture(self) -> None:
        """Refuse what must not be done while a graph is captured."""
        if self.is_capturing:
            raise RuntimeError(CAPTURE_ERROR)

    def become_full(self, *, is_under_way: bool) -> None:
        """Let the next launch of its LateStreams find no memory, if no other failure is due."""
        if not self.failures:
            self.failures.append(Failure(torch.OutOfMemoryError("CUDA out of memory"), is_under_way))

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        """Work, in an order that the dice give, until the host's condition holds."""
        while True:
            with self.lock:
                if is_enough():
                    return
                assert self._do_one(), "streams wait for each other"

    @property
    def is_idle(self) -> bool:
        """True if it has nothing left to do."""
        with self.lock:
            return all(stream.done == stream.launched for stream in self._streams)

    def run_all(self) -> None:
        """Do everything that was launched."""
        with self.lock:
            self.run_until(lambda: all(stream.done == stream.launched for stream in self._streams))

    def run_unstalled(self) -> None:
        """Do everything that is not stalled."""
        with self.lock:
            while self._do_one():
                pass

    def run_at_random(self) -> None:
        """Work a little, or not at all."""
        with self.lock:
            while self.dice.random() < self._eagerness and self._do_one():
                pass

    def _do_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.can_go_on and stream not in self.stalled]
        if not ready:
            return False
        self.clock += 1
        if len(self._speeds) > 1:
            ready = self.dice.choices(ready, [stream.speed for stream in ready])
        self.dice.choice(ready).do_next()
        return True


class Arena:
    """The device's memory. Like torch's allocator, it lends dropped memory at once again to the same stream.

    Memory that other streams use waits until they have done their work so far. Earlier work of the same stream on
    it may not be done yet when it is lent.
    """

    def __init__(self, size_bytes: int) -> None:
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8)
        self.free_bytes = size_bytes
        self._end = 0
        self._owners: dict[int, tuple[LateStream, int]] = {}
        self._users: dict[int, set[LateStream]] = {}
        self._dropped: list[tuple[LateStream, int, int, list[LateEvent]]] = []

    def lend(self, stream: LateStream, size_bytes: int) -> torch.Tensor:
        """Return memory for a stream, if possible some that it had before."""
        for number, (owner, begin, end, events) in enumerate(self._dropped):
            if owner is stream and end - begin == size_bytes and all(event.is_reached for event in events):
                del self._dropped[number]
                return self._part(stream, begin, size_bytes)
        if size_bytes > self.free_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes.")
        begin, self._end = self._end, self._end + size_bytes
        self.free_bytes -= size_bytes
        return self._part(stream, begin, size_bytes)

    def keep(self, memory: torch.Tensor, stream: LateStream) -> None:
        """Note that a stream uses the memory."""
        self._users[self._allocation(memory)].add(stream)

    def drop(self, memory: torch.Tensor) -> None:
        """Take memory back from its owner. Work that was launched may still use it."""
        begin = self._allocation(memory)
        owner, size_bytes = self._owners.pop(begin)
        events = [stream.now() for stream in self._users.pop(begin) if stream is not owner]
        self._dropped.append((owner, begin, begin + size_bytes, events))

    def _part(self, stream: LateStream, begin: int, size_bytes: int) -> torch.Tensor:
        self._owners[begin] = stream, size_bytes
        self._users[begin] = set()
        memory = self._bytes[begin : begin + size_bytes]
        stream.launch(partial(memory.fill_, 0xDB))
        return memory

    def _allocation(self, memory: torch.Tensor) -> int:
        place = memory.data_ptr() - self._bytes.data_ptr()
        return max(begin for begin, (_, size_bytes) in self._owners.items() if begin <= place < begin + size_bytes)


class LateStreams(Streams):
    """The streams of a late device.

    Args:
        late: the device.
        own: the current stream; None for the calling thread's.
    """

    def __init__(self, late: LateDevice, own: LateStream | None = None) -> None:
        super().__init__(CPU)
        self.late = late
        self.own = own
        self.copying = {direction: late.make_stream() for direction in Direction}

    @property
    def current(self) -> LateStream:
        return self.own or self.late.current

    def now(self) -> Any:
        self.late.counts["now"] += 1
        return self.current.now()

    def hold(self, event: Any) -> None:
        self.late.counts["hold"] += 1
        self.current.hold(event)

    def reach(self, event: Any) -> None:
        if event is None:
            return
        self.late.counts["reach"] += 1
        self.late.check_capture()
        self.late.run_until(lambda: event.is_reached)

    def is_reached(self, event: Any) -> bool:
        if event is None:
            return True
        self.late.check_capture()
        self.late.run_at_random()
        return bool(event.is_reached)

    def seconds_between(self, begin: Any, end: Any) -> float:
        if begin is None or end is None:
            return 0.0
        assert begin.is_reached
        assert end.is_reached
        return float(end.stream.done_at[end.place] - begin.stream.done_at[begin.place])

    def keep(self, memory: torch.Tensor) -> None:
        for stream in (self.current, *self.copying.values()):
            self.late.memory.keep(memory, stream)

    def for_thread(self) -> LateStreams:
        return LateStreams(self.late, self.late.make_stream())

    def ends(self) -> list[Any]:
        return [stream.now() for stream in (self.current, *self.copying.values())]

    def wait(self) -> None:
        self.late.counts["wait"] += 1
        for stream in (self.current, *self.copying.values()):
            stream.synchronize()

    def _run(self, work: Work) -> None:
        self.late.counts["run"] += 1
        with self._failing():
            self.current.launch(work)

    def _launch(self, direction: Direction, work: Work, after: Any) -> Any:
        self.late.counts[direction.name] += 1
        stream = self.copying[direction]
        stream.hold(after)
        with self._failing():
            stream.launch(work)
        return stream.now()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        failure = self.late.failures.popleft() if self.late.failures else None
        if failure is not None and not failure.is_under_way:
            raise failure.error
        yield
        if failure is not None:
            raise failure.error

    def _empty(self, size_bytes: int) -> torch.Tensor:
        self.late.check_capture()
        return self.late.memory.lend(self.current, size_bytes)

    def _room(self) -> str:
        return f", of which {self.late.memory.free_bytes} bytes are free"


def late_paged(
    device: LateDevice,
    caches: Mapping[str, LayerCache],
    *,
    num_blocks: int,
    block_tokens: int,
    chunk_tokens: int,
    staging_bytes: int = 0,
    copy_bytes: int = 1,
    streams: Streams | None = None,
) -> DevicePagedKV:
    """Return a paged cache on a late device, with staging for one chunk. The model writes by ``device.current.launch``.

    Copies are as small as possible, unless ``copy_bytes`` says otherwise.
    """
    bound = bind_paged_kv(caches, num_blocks=num_blocks, block_tokens=block_tokens, chunk_tokens=chunk_tokens)
    planes = [find_planes(name, cache, num_blocks) for name, cache in caches.items()]
    return DevicePagedKV(
        planes,
        bound.layout,
        num_blocks,
        streams=streams or LateStreams(device),
        staging_bytes=staging_bytes,
        copy_bytes=copy_bytes,
        group_bytes=copy_bytes,
    )
