"""Engines around vLLM's model that hand KV over to each other's real servers, and a wire between them that can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover, parse_handover
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.handover.tcp import open_transport
from kvstore.handover.transport import Parcel, Transport
from kvstore.model.chunks import Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.progress import Progress
from kvstore.server.hub import Hub
from kvstore.tools.processes import free_port
from support.fake_parts import FakeRequest, Setup
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S

HOST = "127.0.0.1"
NEVER_S = 3600.0  # a deadline that is never reached


def _nothing() -> None:
    pass


class Wire:
    """The way to the receivers; hooks of a test run on the sender's thread.

    ``shard``: the rank whose way it is; None for all. Other ranks have a plain one.
    """

    def __init__(self, shard: int | None = None) -> None:
        self._shard = shard
        self.before_delivery: Callable[[], None] = _nothing
        self.before_layers: Callable[[], None] = _nothing
        self.after_delivery: Callable[[], None] = _nothing

    def connect(self, url: str, namespace: Namespace, layout: KVLayout, _: Mapping[str, object]) -> Transport:
        """Open a transport as ``PushOptions`` wants it."""
        transport = open_transport(url, namespace, layout, {"timeout_s": 5.0})
        return _Wired(self, transport) if self._shard in (None, namespace.fields["shard"]) else transport


class _Wired(Transport):
    def __init__(self, wire: Wire, transport: Transport) -> None:
        self._wire = wire
        self._transport = transport

    def deliver(self, parcels: Sequence[Parcel], ready: Iterator[range]) -> list[Outcome]:
        self._wire.before_delivery()
        outcomes = self._transport.deliver(parcels, self._ready(ready))
        self._wire.after_delivery()
        return outcomes

    def _ready(self, ready: Iterator[range]) -> Iterator[range]:
        for layers in ready:
            self._wire.before_layers()
            yield layers

    def tell(self, progress: Progress) -> None:
        self._transport.tell(progress)

    def close(self) -> None:
        self._transport.close()


def consumer(*, timeout_s: float = NEVER_S, source: FakeVllm | None = None, **how: Any) -> FakeVllm:
    """Make an engine that receives at a free port, and may read what another one keeps."""
    port = free_port()
    allows = None if source is None else (HOST, source.setup.port)
    options = HandoverOptions(
        receives=True,
        own=(HOST, port),
        timeout_s=timeout_s,
        allows_source=lambda host, port: (host, port) == allows,
        shared=how.get("shared"),
    )
    if source is not None:
        how["sources"] = (f"kvs://{HOST}:{source.setup.port}",)
    return FakeVllm(Setup(handover=options, port=port, saves=False, **how))


def producer(wire: Wire, *, keeps: bool = False, **how: Any) -> FakeVllm:
    """Make an engine that computes for others, and may let them read what it keeps."""
    port = free_port() if keeps else None
    own = (HOST, port) if port is not None else None
    options = HandoverOptions(sends=True, own=own, allows_host=HOST.__eq__, shared=how.get("shared"))
    return FakeVllm(Setup(handover=options, receiver=wire, port=port, **how))  # type: ignore[arg-type]


def to(receiver: FakeVllm) -> Handover:
    """Return the hand-over parameters of the request to a producer."""
    assert receiver.setup.port is not None
    return Handover(DisaggSpec("client", HOST, (receiver.setup.port,)))


def answered(request: FakeRequest) -> Handover | None:
    """Return the hand-over parameters of the request to the consumer, from the producer's answer."""
    return parse_handover(request.answer, request.request_id)


def throw_away(vllm: FakeVllm) -> None:
    """Let a consumer's servers forget all chunks that arrived."""
    for worker in vllm.workers:
        assert worker._server is not None
        hub = worker._server._hub
        done = Event()
        hub._jobs.report(partial(_clear, hub, done))
        assert done.wait(HANG_GUARD_S)


def _clear(hub: Hub, done: Event) -> None:
    for space in hub.stock.spaces.values():
        hub.stock.clear(space)
    done.set()


def flush(vllm: FakeVllm) -> None:
    """Wait until everything is sent or given up."""
    for worker in vllm.workers:
        assert worker._pushes._pusher is None or worker._pushes._pusher.flush(10)
