"""Lookups in a tier that are batched: questions that queued up during the last one are asked together.

So a burst of requests costs a few round trips instead of one for each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from kvstore.model.chunks import Answer, Asked
from kvstore.model.errors import KVStoreError
from kvstore.model.threads import carry_out
from kvstore.model.throttle import Throttle

logger = logging.getLogger(__name__)

MAX_TOGETHER: Final = 4096  # chunks asked about at once, as a cache server's message holds; one question may have more


class Question:
    """Chunks and trails to look up, and later the answers, which an ``Asker`` writes.

    Attributes:
        asked: the chunks and trails.
        since: the serial of the caller's ``RemoteView`` when it asked.
        asked_s, answered_s: times of question and answer, by ``time.monotonic``.
        answers: for each of ``asked``, once ``is_done``.
        told: the same, by chunk and trail.
        is_done: the answers are final.
    """

    __slots__ = ("answered_s", "answers", "asked", "asked_s", "is_done", "since", "tell", "told")

    def __init__(
        self, asked: Sequence[Asked], tell: Callable[[Question], object] | None = None, since: int = 0
    ) -> None:
        self.asked = tuple(asked)
        self.since = since
        self.asked_s = time.monotonic()
        self.answered_s = 0.0
        self.answers: Sequence[Answer] = ()
        self.told: Mapping[Asked, Answer] = {}
        self.is_done = False
        self.tell = tell


class Asker:
    """Thread that asks questions in their order.

    Args:
        name: of the thread.
        ask: answers about chunks and trails. It may block; if it raises, the answers are unknown.
        changed: notified when questions are done; several askers may share one.
    """

    def __init__(
        self, name: str, ask: Callable[[Sequence[Asked]], Sequence[Answer]], changed: threading.Condition
    ) -> None:
        self._ask = ask
        self._changed = changed
        self._lock = threading.Lock()  # guards the fields below
        self._waiting: deque[Question | tuple[Callable[[], None], Future[None]]] = deque()
        self._is_working = False
        self._is_closed = False
        self._throttle = Throttle(logger)
        self._thread = ThreadPoolExecutor(1, name)

    def put(self, question: Question) -> None:
        """Queue a question. After ``close``, or if no thread can start, it is done at once, with unknown answers."""
        if not self._queue(question):
            self._finish([question], [None] * len(question.asked))

    def then(self, action: Callable[[], None]) -> Future[None]:
        """Run an action between all earlier and all later questions. After ``close`` it is cancelled.

        If no thread can be started, it runs here, as no question is under way then.
        """
        done: Future[None] = Future()
        if not self._queue((action, done)):
            if self._is_closed:
                done.cancel()
            carry_out((done, action))
        return done

    def refuse(self) -> None:
        """Refuse new questions; waiting ones get unknown answers."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for item in waiting:
            if isinstance(item, Question):
                self._finish([item], [None] * len(item.asked))
            else:
                item[1].cancel()

    def close(self) -> None:
        """Refuse questions, and end the thread after the question under way."""
        self.refuse()
        self._thread.shutdown(wait=True)

    def _queue(self, item: Question | tuple[Callable[[], None], Future[None]]) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if not self._is_working:
                try:
                    self._thread.submit(self._work)
                except RuntimeError as error:
                    self._throttle.log("start", "a remote tier cannot be asked: %s", error)
                    return False
                self._is_working = True
            self._waiting.append(item)
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
        """Take the waiting questions that fit into one call with the first one."""
        together, num_asked = [], len(first.asked)
        while self._waiting and isinstance(question := self._waiting[0], Question):
            num_asked += len(question.asked)
            if num_asked > MAX_TOGETHER:
                break
            self._waiting.popleft()
            together.append(question)
        return together

    def _answer(self, questions: Sequence[Question]) -> None:
        asked = [item for question in questions for item in question.asked]
        answers: Sequence[Answer] = ()
        try:
            answers = self._ask(asked)
        except KVStoreError:  # the circuit breaker has logged it
            pass
        except Exception:  # a bug; callers must not wait forever, and the thread continues
            logger.exception("asking a remote tier failed unexpectedly")
        self._finish(questions, answers if len(answers) == len(asked) else [None] * len(asked))

    def _finish(self, questions: Sequence[Question], answers: Sequence[Answer]) -> None:
        now_s, begin = time.monotonic(), 0
        for question in questions:
            end = begin + len(question.asked)
            question.answers, question.answered_s = answers[begin:end], now_s
            question.told = dict(zip(question.asked, question.answers, strict=True))
            begin = end
            question.is_done = True
            if question.tell is not None:
                question.tell(question)
        with self._changed:
            self._changed.notify_all()
