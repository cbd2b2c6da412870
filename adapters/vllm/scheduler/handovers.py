"""The scheduler's part in handing KV over: sending, waiting and answering.

A producer sends every whole block of a prompt to the engine that its request names, even if it is not stored here.
A consumer waits for the KV that is handed over to it as long as that is in transfer, and does not compute it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.adapters.vllm.plan import StepReport
from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover, Source
from kvstore.adapters.vllm.requests.tracker import LoadSpec, RequestTracker, SaveRules
from kvstore.adapters.vllm.scheduler.outgoing import NOWHERE, Kept, OutgoingHandovers, hit_tokens
from kvstore.adapters.vllm.scheduler.parts import overlapping
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.adapters.vllm.scheduler.waits import Waits
from kvstore.index.index import ChunkIndex
from kvstore.index.plans import Place, chunk_refs
from kvstore.model.chunks import ChunkRef

logger = logging.getLogger(__name__)

SOURCE_GRACE_S: Final = 0.5  # to wait for KV that an earlier answer promised: it is there, or was evicted
_MAX_SAID: Final = 256


@dataclass(frozen=True)
class HandoverOptions:
    """Options for engines that share requests.

    Attributes:
        sends: this engine computes prompts for others.
        receives: it continues requests whose prompts others computed.
        own: host and port at which it takes KV; None if it does not.
        allows_host: tells if a request may have its KV sent to a host.
        allows_source: tells if a request may name the engine at a host and port as a source of its KV.
        sends_to_peers: KV may also be sent to the hosts of peers that DNS or a file names now.
        reads_from_peers: such a peer may also be a source.
        timeout_s: the longest that a request waits for KV in transfer.
        answers: answers name the place of their KV, so that the next turn can load it.
        shared: name of a tier in which engines that do not take KV store what they compute, and which all read.
    """

    sends: bool = False
    receives: bool = False
    own: tuple[str, int] | None = None
    allows_host: Callable[[str], bool] = lambda _: False
    allows_source: Callable[[str, int], bool] = lambda _host, _port: False
    sends_to_peers: bool = False
    reads_from_peers: bool = False
    timeout_s: float = 10.0
    answers: bool = False
    shared: str | None = None


class Handovers:
    """Hand-overs of one engine. For the scheduler's thread.

    Attributes:
        outgoing: the requests whose KV is sent to another engine.
        waits: the requests that wait for KV of another engine.
        is_draining: the engine is about to end, so it begins to send nothing and expects nothing. Set by any thread.

    Args:
        options: the role of this engine.
        rules: the sizes of blocks and chunks.
        plans: has the next plan.
    """

    def __init__(self, options: HandoverOptions, rules: SaveRules, plans: StepTracker) -> None:
        self.outgoing = OutgoingHandovers(rules, plans)
        self.waits = Waits()
        self.is_draining = False
        self._options = options
        self._rules = rules
        self._refused: set[str] = set()  # hosts, and sources
        self._plans = plans
        self._names_peer: Callable[[str, int | None], bool] = lambda _host, _port: False

    def connect(
        self, num_ranks: int, names_peer: Callable[[str, int | None], bool] | None = None, *, takes_parts: bool
    ) -> None:
        """Connect to the workers.

        Args:
            num_ranks: their number.
            names_peer: tells if DNS or a file names a peer with this host, and this port unless it is None, now.
            takes_parts: engines of other tensor-parallel sizes send to them.
        """
        self._names_peer = names_peer or self._names_peer
        self.outgoing.num_ranks = self.waits.num_ranks = num_ranks
        self.waits.takes_parts = takes_parts

    def start(self, tracker: RequestTracker, handover: Handover) -> Source | None:
        """Start a request's hand-over. Return the engine that has some of its KV, if that may be asked."""
        request, spec, source = tracker.request, handover.spec, handover.source
        if spec is not None and self._receives(spec):
            tracker.is_handed_over = True
            num_tokens = max(spec.num_transferred_tokens, spec.num_coming_tokens or 0) or request.num_prompt_tokens
            is_told = self._options.own is not None  # a shared server does not announce transfers
            wait_s = SOURCE_GRACE_S if self.is_draining else self._options.timeout_s
            self._wait_for(tracker, num_tokens, wait_s, spec if is_told else None)
            kept = spec.kept
            if kept is not None and self._is_listed(kept):
                self.waits.name_source(request.request_id, SOURCE_GRACE_S, kept.url)
            elif spec.kept_url is not None and spec.kept_url == self._options.shared:
                self.waits.name_source(request.request_id, SOURCE_GRACE_S)  # the shared tier is asked anyway
        elif spec is not None and self._sends_now and all(map(self._is_allowed, spec.receiver_hosts)):
            self.outgoing.begin(tracker, spec, wants_first_token=handover.wants_first_token)
        if source is None or not self._is_allowed_source(source):
            return None
        self._wait_for(tracker, source.num_tokens, SOURCE_GRACE_S)
        return source

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.outgoing.end(request_id)
        self.waits.end(request_id)

    def admitted(self, tracker: RequestTracker, index: ChunkIndex, load: LoadSpec | None) -> None:
        """Release the chunks held by this engine's servers for a starting request, except those it is about to read."""
        if not tracker.is_handed_over or self._options.own is None:
            return
        read: set[ChunkRef] = set()
        if load is not None:
            parts = overlapping(load.match, self._rules, load.num_local_tokens, load.num_external_tokens)
            read = {part.ref for part in parts if index.source(part.ref, load.told) is Place.REMOTE}
        self._plans.next.used += [ref for ref in chunk_refs(tracker.hasher, with_tail=True) if ref not in read]

    def complete(self, report: StepReport) -> None:
        """Process the workers' reports on KV sent to other engines and on KV that other engines send."""
        self.outgoing.note_settled(report.settled)
        self.waits.note_senders(report.senders)

    def answer(self, tracker: RequestTracker, *, first_token: int | None) -> dict[str, object] | None:
        """Return ``kv_transfer_params`` for an answer: the hand-over, or the place of the KV for the next turn."""
        request, options = tracker.request, self._options
        kept = Kept(options.own, options.shared) if tracker.saves else NOWHERE
        sent = self.outgoing.answer(tracker, kept, first_token=first_token)
        if sent is not None or not options.answers or options.own is None or self.is_draining:
            return sent
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if self._rules.spares_last_token:  # a hit ends at a checkpoint
            num_tokens = min(num_tokens, tracker.checkpoint_tokens)
        host, port = options.own
        num_tokens -= num_tokens % self._rules.block_tokens
        return {"remote_host": host, "remote_port": port, "num_tokens": num_tokens}

    @property
    def _sends_now(self) -> bool:
        return self._options.sends and not self.is_draining

    def _wait_for(
        self, tracker: RequestTracker, num_tokens: int, wait_s: float, spec: DisaggSpec | None = None
    ) -> None:
        num_tokens = hit_tokens(tracker, self._rules, num_tokens)
        self.waits.begin(tracker.request.request_id, num_tokens, wait_s, spec)

    def _receives(self, spec: DisaggSpec) -> bool:
        """Tell if a request's KV is sent to this engine, rather than from it to another."""
        options = self._options
        if options.sends and options.receives:
            return (spec.receiver_hosts[0], spec.receiver_init_port[0]) == options.own
        return options.receives

    # -- allowed engines ---------------------------------------------------------------------------------------------

    def _is_allowed(self, host: str) -> bool:
        """Tell if a request may have KV sent to a host."""
        options = self._options
        is_peer = options.sends_to_peers and self._names_peer(host, None)
        return options.allows_host(host) or is_peer or self._refuse(host, "is not in pd_allowed_hosts")

    def _is_allowed_source(self, source: Source) -> bool:
        """Tell if a request may have KV fetched from an engine."""
        why = "is not listed with its port in pd_allowed_hosts or peers, or pd_bidirectional is not set"
        return self._is_listed(source) or self._refuse(f"{source.remote_host}:{source.remote_port}", why)

    def _is_listed(self, source: Source) -> bool:
        host, port, options = source.remote_host, source.remote_port, self._options
        return options.allows_source(host, port) or (options.reads_from_peers and self._names_peer(host, port))

    def _refuse(self, name: str, why: str) -> Literal[False]:
        """Log a refused name once, and return False."""
        if name not in self._refused and len(self._refused) < _MAX_SAID:
            self._refused.add(name)
            logger.warning("hand-over ignored: a request names the host %r, which %s (logged once)", name, why)
        return False
