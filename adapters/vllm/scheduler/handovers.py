"""The scheduler's part in handing KV over: what to send, what to wait for, and what to answer.

A producer sends every whole block of a prompt to the engine that its request names, whether or not it is stored here.
A consumer waits, within a deadline, for what is on its way, and does not compute it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvstore.adapters.vllm.plan import ReqMeta, StepPlan
from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover, Source
from kvstore.adapters.vllm.requests.pieces import Piece, pieces_of
from kvstore.adapters.vllm.requests.rows import RowMap, StatesOf
from kvstore.adapters.vllm.requests.tracker import RequestTracker, SaveRules, chunks_of
from kvstore.adapters.vllm.scheduler.loads import TablesOf
from kvstore.handover.pusher import PushJob
from kvstore.throttle import Throttle

logger = logging.getLogger(__name__)

SOURCE_GRACE_S: Final = 0.5  # how long to wait for what an earlier answer promised: it is there, or was evicted
_ASK_INTERVAL_S: Final = 0.005
_ASK_SHARE: Final = 0.02  # of the time waited so far, between two questions: they cost the scheduler time
_MAX_SAID: Final = 256


@dataclass(frozen=True)
class HandoverOptions:
    """What the configuration says about engines that share requests.

    Attributes:
        sends: this engine computes prompts for others.
        receives: it goes on with what others computed.
        own: where it takes KV itself; None if it does not.
        allows_host: whether a request may have its KV sent to a host.
        allows_source: whether a request may name the engine at a host and port as one that has its KV.
        timeout_s: how long a request waits for what is on its way.
        answers: answers say where their KV is, so that the next turn can load it.
    """

    sends: bool = False
    receives: bool = False
    own: tuple[str, int] | None = None
    allows_host: Callable[[str], bool] = lambda _: False
    allows_source: Callable[[str, int], bool] = lambda _host, _port: False
    timeout_s: float = 10.0
    answers: bool = False


@dataclass
class _Sending:
    """A request whose KV goes elsewhere."""

    spec: DisaggSpec
    wants_first_token: bool
    useful_tokens: int  # of the prompt, up to the first chunk that was left out
    num_chunks: int = 0  # handed to the workers so far
    is_complete: bool = False  # its tail, too
    checkpoint_tokens: int = 0  # where the last checkpoint was that was sent


@dataclass
class _Waiting:
    """A request some of whose KV is on its way, or was promised."""

    num_tokens: int
    wait_s: float
    deadline_s: float | None = None  # from the first question on
    ask_s: float = 0.0


class Handovers:
    """One per engine. For the scheduler's thread.

    Args:
        options: which part this engine plays.
        rules: the sizes of blocks and chunks.
    """

    def __init__(self, options: HandoverOptions, rules: SaveRules) -> None:
        self.timeouts = 0  # requests that waited in vain
        self._options = options
        self._rules = rules
        self._sending: dict[str, _Sending] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._metas: dict[str, ReqMeta] = {}  # for the next plan
        self._refused: set[str] = set()  # hosts, and sources
        self._throttle = Throttle(logger)

    def start(self, tracker: RequestTracker, handover: Handover) -> Source | None:
        """Take in what a request says. Returns the engine that has some of its KV, if that may be asked."""
        request = tracker.request
        spec, source = handover.spec, handover.source
        if spec is not None and self._receives(spec):
            tracker.is_handed_over = True
            num_tokens = spec.num_transferred_tokens or request.num_prompt_tokens
            self._wait_for(request.request_id, self._hit_tokens(tracker, num_tokens), self._options.timeout_s)
        elif spec is not None and self._options.sends and self._is_allowed(spec.receiver_host):
            self._sending[request.request_id] = _Sending(spec, handover.wants_first_token, request.num_prompt_tokens)
        if source is None or not self._is_allowed_source(source):
            return None
        self._wait_for(request.request_id, self._hit_tokens(tracker, source.num_tokens), SOURCE_GRACE_S)
        return source

    def end(self, request_id: str) -> None:
        """A request is gone."""
        self._sending.pop(request_id, None)
        self._waiting.pop(request_id, None)

    # -- what others send --------------------------------------------------------------------------------------------

    def must_wait(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request, of which ``num_tokens`` are known here, waits for more; False after its deadline."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        now_s = time.monotonic()
        if waiting.deadline_s is None:
            waiting.deadline_s = now_s + waiting.wait_s
        if num_tokens >= waiting.num_tokens:
            del self._waiting[request_id]
            return False
        if now_s < waiting.deadline_s:
            waited_s = now_s - (waiting.deadline_s - waiting.wait_s)
            waiting.ask_s = now_s + max(_ASK_INTERVAL_S, _ASK_SHARE * waited_s)
            return True
        del self._waiting[request_id]
        self.timeouts += 1
        self._throttle.log(
            "late",
            "%d tokens of a request, handed over by another engine, have not come within %s s and are computed",
            waiting.num_tokens - num_tokens,
            waiting.wait_s,
        )
        return False

    def asked_just_now(self, request_id: str) -> bool:
        """Whether it is too early to ask again whether more has arrived."""
        waiting = self._waiting.get(request_id)
        return waiting is not None and time.monotonic() < waiting.ask_s

    def _wait_for(self, request_id: str, num_tokens: int, wait_s: float) -> None:
        known = self._waiting.get(request_id)
        if num_tokens and (known is None or known.num_tokens < num_tokens):
            self._waiting[request_id] = _Waiting(num_tokens, wait_s)

    def _hit_tokens(self, tracker: RequestTracker, num_tokens: int) -> int:
        """Of so many tokens that are elsewhere, those in whole blocks that a hit of a prompt can bring."""
        num_tokens = max(0, min(num_tokens, tracker.request.num_prompt_tokens - self._rules.spares_last_token))
        return num_tokens - num_tokens % self._rules.block_tokens

    def _receives(self, spec: DisaggSpec) -> bool:
        """Whether a request's KV comes to this engine, rather than leaving for another."""
        options = self._options
        if options.sends and options.receives:
            return (spec.receiver_host, spec.receiver_init_port[0]) == options.own
        return options.receives

    # -- what goes to others -----------------------------------------------------------------------------------------

    @property
    def sending(self) -> Iterable[str]:
        """The requests whose KV goes to another engine."""
        return self._sending.keys()

    def plan(
        self,
        tracker: RequestTracker,
        num_scheduled_tokens: int,
        tables_of: TablesOf,
        rows: RowMap,
        states_of: StatesOf,
    ) -> None:
        """Add to the next plan what of a prompt the coming step of ``num_scheduled_tokens`` completes."""
        request = tracker.request
        sending = self._sending.get(request.request_id)
        if sending is None or sending.is_complete:
            return
        # Up to its last whole block: a state that a step leaves there is gone with the next.
        prompt_tokens = self._hit_tokens(tracker, request.num_prompt_tokens)
        written_tokens = request.num_computed_tokens + num_scheduled_tokens
        is_complete = written_tokens >= prompt_tokens
        limit_tokens = min(written_tokens, prompt_tokens)
        tracker.hasher.update(request.all_token_ids)
        tail_tokens = prompt_tokens if is_complete else 0
        chunks = chunks_of(tracker.hasher, self._rules, sending.num_chunks, limit_tokens, tail_tokens)
        sending.num_chunks = max(sending.num_chunks, limit_tokens // self._rules.chunk_tokens)
        sending.is_complete = is_complete
        if chunks is not None:
            tables = tables_of(request.request_id)
            steps_tokens = (request.num_computed_tokens, written_tokens)
            states = rows.states_at(tables, steps_tokens, states_of(request.request_id))
            chunks = replace(chunks, marks=(prompt_tokens,))
            self._push(request.request_id, sending, rows, pieces_of(rows, chunks, tables, states))
        if rows.checkpoints is not None and is_complete:
            sending.useful_tokens = min(sending.useful_tokens, sending.checkpoint_tokens)

    def _push(self, request_id: str, sending: _Sending, rows: RowMap, pieces: Iterable[Piece]) -> None:
        """Add pieces to the next plan."""
        meta = self._metas.setdefault(request_id, ReqMeta(request_id))
        meta.receiver = sending.spec
        for piece in pieces:
            if piece.rows is None:  # it has left a sliding window
                sending.useful_tokens = min(sending.useful_tokens, piece.begin * self._rules.block_tokens)
                continue
            meta.pushes.append(PushJob(piece.ref, piece.rows))
            needs_nothing = rows.checkpoints is not None and not rows.checkpoints.rows(piece.end_tokens)
            if piece.checkpoint or needs_nothing:
                sending.checkpoint_tokens = piece.end_tokens

    def fill(self, plan: StepPlan) -> None:
        """Put into a plan the chunks that its step hands over."""
        plan.requests += self._metas.values()
        self._metas = {}

    def restart(self) -> None:
        """Send everything again, as some of it was computed on garbage; what has arrived is left out then."""
        for sending in self._sending.values():
            sending.num_chunks = 0
            sending.is_complete = False

    # -- answers -----------------------------------------------------------------------------------------------------

    def answer(self, tracker: RequestTracker, *, first_token: int | None) -> dict[str, object] | None:
        """``kv_transfer_params`` of a request's answer: what was handed over, or where its KV is, for the next turn."""
        request, options = tracker.request, self._options
        block_tokens = self._rules.block_tokens
        sending = self._sending.get(request.request_id)
        if sending is not None:
            num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            num_tokens = min(num_tokens, sending.useful_tokens)
            sent_tokens = num_tokens - num_tokens % block_tokens if sending.is_complete else 0
            spec = replace(sending.spec, num_transferred_tokens=sent_tokens, is_last_prefill=sending.is_complete)
            answer: dict[str, object] = {"disagg_spec": spec.as_params()} if sending.useful_tokens else {}
            if sending.wants_first_token and first_token is not None:
                answer["first_tok"] = first_token
            return answer
        if not options.answers or options.own is None:
            return None
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if self._rules.spares_last_token:  # a hit ends at a checkpoint
            num_tokens = min(num_tokens, tracker.checkpoint_tokens)
        host, port = options.own
        return {"remote_host": host, "remote_port": port, "num_tokens": num_tokens - num_tokens % block_tokens}

    # -- who may be named --------------------------------------------------------------------------------------------

    def _is_allowed(self, host: str) -> bool:
        """Whether a request may have KV sent to a host."""
        return self._options.allows_host(host) or self._refuse(host, "is not in pd_allowed_hosts")

    def _is_allowed_source(self, source: Source) -> bool:
        """Whether a request may have KV fetched from an engine."""
        host, port = source.remote_host, source.remote_port
        why = "is not listed with its port in pd_allowed_hosts or peers, or pd_bidirectional is not set"
        return self._options.allows_source(host, port) or self._refuse(f"{host}:{port}", why)

    def _refuse(self, name: str, why: str) -> Literal[False]:
        """Log each name once. Returns False, for a request may not name it."""
        if name not in self._refused and len(self._refused) < _MAX_SAID:
            self._refused.add(name)
            logger.warning("hand-over ignored: a request names the host %r, which %s (logged once)", name, why)
        return False
