"""Requests that wait for KV that another engine hands over or has promised, until it has arrived or cannot arrive.

When the answer to a prompt leaves the engine that computes it, its last chunks are still in transfer. The sender
reports their outcome to the servers of this engine's workers, and these report it here. For a sender that reports
nothing, requests wait until a deadline.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.adapters.vllm.requests.params import DisaggSpec
from kvstore.model.throttle import Throttle
from kvstore.protocol.progress import ALL_TOKENS, Progress

logger = logging.getLogger(__name__)

ABSENT_S: Final = 0.1  # a sender without a connection to a rank for so long sends nothing more
_ASK_INTERVAL_S: Final = 0.005
_ASK_SHARE: Final = 0.02  # of the time waited so far, between two questions: they cost the scheduler time


@dataclass
class _Wait:
    """Wait of one request.

    Attributes:
        num_tokens: the tokens that it waits for.
        wait_s: the longest wait.
        spec: names the hand-over, if its progress is reported here.
        deadline_s: end of the wait, which starts with the first question.
        ask_s: time of the next question.
        absent_s: time since which the sender is unknown to a rank.
        is_last: nothing more arrives, and the arrived KV was looked up once more.
        source: address that has the KV that does not arrive; empty if none is known.
        grace_s: time for which missing KV is looked up elsewhere, where it may still be being written.
        over_s: time since which nothing more arrives.
    """

    num_tokens: int
    wait_s: float
    spec: DisaggSpec | None = None
    deadline_s: float | None = None
    ask_s: float = 0.0
    absent_s: float | None = None
    is_last: bool = False
    source: str = ""
    grace_s: float = 0.0
    over_s: float | None = None


class Waits:
    """Waits of one engine's requests. For the scheduler's thread.

    Attributes:
        timeouts: requests that waited until their deadline in vain.
        num_ranks: number of this engine's workers.
        takes_parts: engines with fewer workers, which do not send to each of ours, send here, too.
    """

    def __init__(self) -> None:
        self.timeouts = 0
        self.num_ranks = 1
        self.takes_parts = False
        self._waits: dict[str, _Wait] = {}
        self._senders: defaultdict[int, dict[str, Progress]] = defaultdict(dict)  # by the rank that they send to
        self._throttle = Throttle(logger)

    def __len__(self) -> int:
        return len(self._waits)

    def begin(self, request_id: str, num_tokens: int, wait_s: float, spec: DisaggSpec | None = None) -> None:
        """Make a request wait for ``num_tokens``. Of two calls for one request the one for more tokens counts."""
        known = self._waits.get(request_id)
        if num_tokens and (known is None or known.num_tokens < num_tokens):
            self._waits[request_id] = _Wait(num_tokens, wait_s, spec)

    def name_source(self, request_id: str, grace_s: float, url: str = "") -> None:
        """Note that missing KV is kept elsewhere, after ``grace_s`` at the latest, and that ``url`` is asked, too."""
        if request_id in self._waits:
            self._waits[request_id].source, self._waits[request_id].grace_s = url, grace_s

    def take_source(self, request_id: str) -> str:
        """Return the address to ask, too, as KV is missing; empty without one, and for a sender that has gone."""
        wait = self._waits.get(request_id)
        if wait is None or not wait.is_last or wait.absent_s is not None:
            return ""
        source, wait.source = wait.source, ""
        return source

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._waits.pop(request_id, None)

    def note_senders(self, senders: Mapping[int, Mapping[str, Progress | None]]) -> None:
        """Note the changed progress of senders, by the rank that receives; None for a sender that has gone."""
        for rank, changed in senders.items():
            known = self._senders[rank]
            known.update({sender: progress for sender, progress in changed.items() if progress is not None})
            for sender in changed:
                if changed[sender] is None:
                    known.pop(sender, None)
        for wait in self._waits.values() if senders else ():
            wait.ask_s = 0.0

    def must_wait(self, request_id: str, num_tokens: int) -> bool:
        """Tell if a request, of which ``num_tokens`` are known here, waits for more, as more may arrive."""
        wait = self._waits.get(request_id)
        if wait is None:
            return False
        now_s = time.monotonic()
        if wait.deadline_s is None:
            wait.deadline_s = now_s + wait.wait_s
        if num_tokens >= wait.num_tokens:
            del self._waits[request_id]
            return False
        is_over = num_tokens >= self._coming_tokens(wait, now_s)
        if now_s < wait.deadline_s and not (is_over and wait.is_last and self._has_no_grace(wait, now_s)):
            waited_s = 0.0 if is_over else now_s - (wait.deadline_s - wait.wait_s)
            wait.ask_s = now_s + max(_ASK_INTERVAL_S, _ASK_SHARE * waited_s)
            if wait.absent_s is not None:
                wait.ask_s = min(wait.ask_s, max(now_s + _ASK_INTERVAL_S, wait.absent_s + ABSENT_S))
            wait.is_last = is_over
            return True
        del self._waits[request_id]
        self._end_in_vain(wait, wait.num_tokens - num_tokens, is_over=is_over)
        return False

    def asked_just_now(self, request_id: str) -> bool:
        """Tell if it is too early to look up again if more has arrived."""
        wait = self._waits.get(request_id)
        return wait is not None and time.monotonic() < wait.ask_s

    def _has_no_grace(self, wait: _Wait, now_s: float) -> bool:
        """Tell if missing KV will not be found elsewhere either. A sender that has gone writes no more."""
        if wait.over_s is None:
            wait.over_s = now_s
        return wait.absent_s is not None or now_s - wait.over_s >= wait.grace_s

    def _coming_tokens(self, wait: _Wait, now_s: float) -> int:
        """Return the token up to which KV may still arrive on all ranks, as KV that one rank lacks is of no use."""
        spec = wait.spec
        if spec is None or spec.sender is None or spec.handover is None:
            return ALL_TOKENS
        told = [self._senders[rank].get(spec.sender) for rank in range(self.num_ranks)]
        known = [progress for progress in told if progress is not None]
        is_known = bool(known) if self.takes_parts else None not in told
        if is_known:
            wait.absent_s = None
        elif wait.absent_s is None:
            wait.absent_s = now_s
        if wait.absent_s is not None and now_s - wait.absent_s >= ABSENT_S:
            return 0  # gone from one rank, even if it still reports to others
        is_coming = not is_known or any(progress.end_tokens(spec.handover) for progress in known)
        limits = (progress.limit_tokens(spec.handover) for progress in known)
        return min(limits, default=ALL_TOKENS) if is_coming else 0

    def _end_in_vain(self, wait: _Wait, missing_tokens: int, *, is_over: bool) -> None:
        if is_over:
            said = "%d tokens of a request are computed: the other engine did not hand them over"
            self._throttle.log("over", said, missing_tokens)
            return
        self.timeouts += 1
        self._throttle.log(
            "late",
            "%d tokens of a request are computed: the other engine did not hand them over within %s s",
            missing_tokens,
            wait.wait_s,
        )
