"""Questions to a tier about what it holds. Questions that queued up during the last one are asked together, as one.

So a burst of requests costs a few round trips, instead of one for each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from kvstore.chunks import ChunkRef
from kvstore.errors import KVStoreError
from kvstore.tiers.tasks import carry_out

logger = logging.getLogger(__name__)

MAX_TOGETHER: Final = 4096  # chunks asked about at once, unless a single question has more: a message of a cache server

Answer = bool | None
"""Whether a chunk is there. None: unknown, as the tier failed or did not answer in time."""


class Question:
    """Chunks that a caller asks about, and later the answers, which an ``Asker`` writes.

    Attributes:
        refs: the chunks.
        since: the serial of the caller's ``RemoteView`` when it asked.
        asked_s, answered_s: when; by ``time.monotonic``.
        answers: for each chunk, once ``is_done``.
        told: the same, by chunk.
        is_done: the answers are final.
    """

    __slots__ = ("answered_s", "answers", "asked_s", "is_done", "refs", "since", "tell", "told")

    def __init__(
        self, refs: Sequence[ChunkRef], tell: Callable[[Question], object] | None = None, since: int = 0
    ) -> None:
        self.refs = tuple(refs)
        self.since = since
        self.asked_s = time.monotonic()
        self.answered_s = 0.0
        self.answers: Sequence[Answer] = ()
        self.told: Mapping[ChunkRef, Answer] = {}
        self.is_done = False
        self.tell = tell


class Asker:
    """Asks on a thread of its own, in the order of the questions.

    Args:
        name: of the thread.
        ask: answers about chunks. It may block; if it raises, the answers are unknown.
        changed: is notified when questions are done; several askers may share one.
    """

    def __init__(
        self, name: str, ask: Callable[[Sequence[ChunkRef]], Sequence[Answer]], changed: threading.Condition
    ) -> None:
        self._ask = ask
        self._changed = changed
        self._lock = threading.Lock()  # of what follows
        self._waiting: deque[Question | tuple[Callable[[], None], Future[None]]] = deque()
        self._is_working = False
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, name)

    def put(self, question: Question) -> None:
        """Queue a question. After ``close`` it is done at once, with unknown answers."""
        if not self._queue(question):
            self._finish([question], [None] * len(question.refs))

    def then(self, action: Callable[[], None]) -> Future[None]:
        """Run an action after all earlier questions and before all later ones. After ``close`` it is cancelled."""
        done: Future[None] = Future()
        if not self._queue((action, done)):
            done.cancel()
        return done

    def refuse(self) -> None:
        """Take no more questions; the answers of those that wait are unknown."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for item in waiting:
            if isinstance(item, Question):
                self._finish([item], [None] * len(item.refs))
            else:
                item[1].cancel()

    def close(self) -> None:
        """``refuse``, and end the thread after the question under way."""
        self.refuse()
        self._thread.shutdown(wait=True)

    def _queue(self, item: Question | tuple[Callable[[], None], Future[None]]) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            self._waiting.append(item)
            if not self._is_working:
                self._is_working = True
                self._thread.submit(self._work)
        return True

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_working = False
                    return
                first = self._waiting.popleft()
                together = self._take_more(first) if isinstance(first, Question) else []
            if isinstance(first, Question):
                self._answer([first, *together])
            else:
                carry_out((first[1], first[0]))

    def _take_more(self, first: Question) -> list[Question]:
        """The waiting questions that fit into one call with the first one."""
        together, num_refs = [], len(first.refs)
        while self._waiting and isinstance(question := self._waiting[0], Question):
            num_refs += len(question.refs)
            if num_refs > MAX_TOGETHER:
                break
            self._waiting.popleft()
            together.append(question)
        return together

    def _answer(self, questions: Sequence[Question]) -> None:
        refs = [ref for question in questions for ref in question.refs]
        answers: Sequence[Answer] = ()
        try:
            answers = self._ask(refs)
        except KVStoreError:  # the circuit breaker has logged it
            pass
        except Exception:  # a bug; callers must not wait forever, and the thread goes on
            logger.exception("asking a remote tier failed unexpectedly")
        self._finish(questions, answers if len(answers) == len(refs) else [None] * len(refs))

    def _finish(self, questions: Sequence[Question], answers: Sequence[Answer]) -> None:
        now_s, begin = time.monotonic(), 0
        for question in questions:
            end = begin + len(question.refs)
            question.answers, question.answered_s = answers[begin:end], now_s
            question.told = dict(zip(question.refs, question.answers, strict=True))
            begin = end
            question.is_done = True
            if question.tell is not None:
                question.tell(question)
        with self._changed:
            self._changed.notify_all()
