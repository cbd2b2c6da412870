"""Hand-overs of a worker, which send blocks of a step to other engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch.profiler import record_function

from kvstore.adapters.vllm.plan import ReqMeta, StepPlan
from kvstore.adapters.vllm.requests.params import server_url
from kvstore.channels import open_channel
from kvstore.handover.offering import Exposed, open_offering
from kvstore.handover.pusher import PushCounters, Pusher, StepPush
from kvstore.handover.tcp import open_transport
from kvstore.handover.tracker import PushJob, Settled
from kvstore.handover.transport import Receiver, Transport
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.ops import metrics
from kvstore.ops.meters import push_totals
from kvstore.ops.metrics import Meter, Tally
from kvstore.paged.base import PagedKV


@dataclass(frozen=True)
class PushOptions:
    """Options of a worker for handing KV over.

    Attributes:
        rank: rank of this worker, which selects the receivers' port.
        buffer_bytes: size of the buffer for KV that has been gathered and not yet sent.
        settings: settings of the connections, as for a cache server: the deadline and the keys.
        channel: the channel through which receivers may read the buffer; None for none.
        connect: opens a transport to a URL.
    """

    rank: int
    buffer_bytes: int
    settings: Mapping[str, object] = field(default_factory=dict)
    channel: str | None = None
    connect: Callable[[str, Namespace, KVLayout, Mapping[str, object]], Transport] = open_transport


class Pushes:
    """Hand-overs of one worker. For the model's thread.

    Args:
        paged: the model's KV cache.
        namespace: that of the chunks that are handed over.
        options: options of the hand-overs; None hands nothing over.

    Raises:
        ConfigError: there is no memory for the buffer.
    """

    def __init__(self, paged: PagedKV, namespace: Namespace, options: PushOptions | None) -> None:
        self._paged = paged
        self._options = options
        self._meter = Meter()
        self._pusher: Pusher | None = None
        self._exposed: Exposed | None = None
        if options is not None:  # now, as taking and pinning memory takes seconds, too long for a step
            connect = partial(self._connect, options, namespace)
            self._pusher = Pusher(paged, options.buffer_bytes, connect, PushCounters())
            channel = open_channel(options.channel, self._pusher.memory)
            self._exposed = None if channel is None else Exposed(channel, self._pusher.memory)
        self._step: StepPush | None = None

    def begin(self, requests: Sequence[ReqMeta]) -> None:
        """Start the hand-overs of a step. A second call in a step does nothing."""
        if self._options is None or self._pusher is None or self._step is not None:
            return
        pushes = self._pushes(self._options, requests)
        if pushes:
            self._pusher.tracker.sender = next((meta.receiver.sender or "" for meta in requests if meta.receiver), "")
            self._step = self._pusher.begin(pushes)

    def reach(self, layer: int) -> None:
        """Note that the model has computed a layer."""
        if self._step is not None:
            self._step.reach(layer)

    def finish(self, *, trusted: bool) -> None:
        """End the hand-overs of a step; the receivers complete nothing of it unless it is ``trusted``."""
        step, self._step = self._step, None
        if step is not None:
            with record_function("kvstore::push"):
                step.finish(trusted=trusted)

    def end_step(self, plan: StepPlan, *, trusted: bool) -> None:
        """Finish the chunks that a plan hands over, in whole or not at all, and the hand-overs that it ends."""
        if self._options is None or self._pusher is None:
            return
        if trusted:
            self.begin(plan.requests)  # in case vLLM named no layer
        elif self._step is None:
            self._pusher.forgo(self._pushes(self._options, plan.requests))
        self.finish(trusted=trusted)
        self._pusher.complete(plan.ended_handovers)

    def enter(self, namespace: Namespace) -> None:
        """Hand over under another namespace. KV in transfer arrives in the background, under the previous one."""
        self.finish(trusted=False)
        if self._pusher is not None and self._options is not None:
            self._pusher.change(partial(self._connect, self._options, namespace))

    def read(self, tally: Tally) -> None:
        """Count what has been handed over since the last call."""
        if self._pusher is not None:
            read_bytes = self._exposed.read_bytes if self._exposed is not None else 0
            self._meter.advance(push_totals(self._pusher.counters, read_bytes), tally)
            tally.observe(metrics.PUSH_SECONDS.key(), self._pusher.take_seconds())

    def take_settled(self) -> Settled:
        """Return the outcomes of chunks since the last call."""
        return self._pusher.tracker.take_settled() if self._pusher is not None else Settled()

    def close(self, timeout_s: float) -> None:
        """Let transfers end, within the bound, and close the connections."""
        self.finish(trusted=False)
        if self._pusher is not None:
            self._pusher.close(timeout_s)
        if self._exposed is not None:
            self._exposed.channel.close()

    @staticmethod
    def _pushes(options: PushOptions, requests: Sequence[ReqMeta]) -> list[tuple[Receiver, Sequence[PushJob]]]:
        pushes = ((meta.receiver, meta.pushes) for meta in requests)
        return [(spec.receiver(options.rank), jobs) for spec, jobs in pushes if spec is not None and jobs]

    def _connect(self, options: PushOptions, namespace: Namespace, receiver: Receiver) -> Transport:
        url = server_url(receiver.host, receiver.port)
        if self._exposed is not None:
            return open_offering(url, namespace, self._paged.layout, options.settings, self._exposed)
        return options.connect(url, namespace, self._paged.layout, options.settings)
