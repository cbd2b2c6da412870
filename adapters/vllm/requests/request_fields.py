"""Reads the fields of requests, and reports wrong ones. No vLLM types."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvstore.adapters.vllm.requests.params import (
    WITHOUT_CACHE,
    FieldError,
    Handover,
    RequestParams,
    parse_handover,
    parse_params,
)
from kvstore.config import StoreConfig
from kvstore.model.throttle import Throttle

logger = logging.getLogger(__name__)

PROBLEM: Final = "kvstore_problem"
"""Names the problem in the answer's ``kv_transfer_params``. It is no request field, as clients may send it back."""


class RequestFields:
    """Reader of requests that reports wrong fields to the log, a counter and the client. For the scheduler's thread.

    Args:
        config: says which fields count.
        count: counts a wrong field.
    """

    def __init__(self, config: StoreConfig, count: Callable[[str], None]) -> None:
        self._config = config
        self._count = count
        self._throttle = Throttle(logger)
        self._problems: dict[str, str] = {}  # by request, until it ends

    def read(self, request_id: str, *sources: object) -> tuple[RequestParams, Handover | None]:
        """Return the fields of a request that count. With a wrong field it is served without the cache.

        Of the sources the last, its ``kv_transfer_params``, overrides the others; it also names the hand-over.
        Such a request is still tracked, because it may share blocks whose load fails.
        """
        try:
            asked = parse_params(*sources, counted=self._config.request_fields)
            for name in asked.ignored:
                said = "kvstore.%s of a request is ignored: request_fields does not list it"
                self._throttle.log(f"ignored {name}", said, name)
            return asked, parse_handover(sources[-1], request_id) if self._config.enable_pd else None
        except FieldError as error:
            self._count(error.field)
            self._problems[request_id] = str(error)
            self._throttle.log(str(error), "a request is served without the cache: %s", error)
            return WITHOUT_CACHE, None

    def answer(self, request_id: str, answer: dict[str, object] | None) -> dict[str, object] | None:
        """Return the answer to a request that ends, with the problem of its fields, if any."""
        problem = self._problems.pop(request_id, None)
        return answer if problem is None else {**(answer or {}), PROBLEM: problem}
