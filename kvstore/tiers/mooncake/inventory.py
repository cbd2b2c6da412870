"""Contents of a Mooncake Store, for tools: by the pages that its master serves over HTTP, and a call of its client."""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from contextlib import closing
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from kvstore.model.errors import TierError
from kvstore.tiers.abandonable_threads import start_aside
from kvstore.tiers.base import TierCounters
from kvstore.tiers.mooncake.calls import Calls
from kvstore.tiers.mooncake.child import PAGE_BYTES
from kvstore.tiers.mooncake.names import Home
from kvstore.tiers.mooncake.url import MooncakeTarget

_MOST_BYTES: Final = 1 << 28  # of a page; a million keys take 80 MB
_CHUNK: Final = re.compile(r"kvs:(?P<namespace>[0-9a-f]{16}):(?P<epoch>[0-9a-f]{16}):[0-9a-f]{32}-\d+")
_USED: Final = re.compile(r"^(Used|Capacity)\(bytes\)\s*:\s*(\d+)$", re.MULTILINE)


class Segment(NamedTuple):
    """Memory that a host gives to the store."""

    name: str
    used_bytes: int
    capacity_bytes: int


def segments(target: MooncakeTarget) -> list[Segment]:
    """Return the memory of the store.

    Raises:
        TierError: the master serves no pages, or not all of them within the target's ``timeout_s``.
    """
    found = []
    deadline_s = time.monotonic() + target.timeout_s
    for name in _page(target, "/get_all_segments", deadline_s).split():
        # The master decodes nothing, and its names are of these.
        page = _page(target, f"/query_segment?segment={quote(name, safe=':[]')}", deadline_s)
        sizes = dict(_USED.findall(page))
        found.append(Segment(name, int(sizes.get("Used", 0)), int(sizes.get("Capacity", 0))))
    return found


def describe(target: MooncakeTarget) -> dict[str, Any]:
    """Return the memory of the store, and the number of chunks of each namespace and epoch, for ``kvstore inspect``.

    Raises:
        TierError: the master serves no pages, or not within twice the target's ``timeout_s``.
    """
    page = _page(target, "/get_all_keys", time.monotonic() + target.timeout_s)
    counts = Counter((match["namespace"], match["epoch"]) for match in _CHUNK.finditer(page))
    return {
        "kind": "mooncake",
        "path": str(target),
        "segments": [segment._asdict() for segment in segments(target)],
        "namespaces": [
            {"namespace": namespace, "epoch": epoch, "chunks": counts[namespace, epoch]}
            for namespace, epoch in sorted(counts)
        ],
    }


def answer_s(target: MooncakeTarget) -> float:
    """Return the seconds that the master takes for an answer to a client, which is started for it.

    Raises:
        TierError: it does not answer, or Mooncake cannot be loaded.
    """
    home = Home(bytes(8), "0" * 16)
    with closing(Calls(target, PAGE_BYTES, TierCounters())) as calls:
        calls.ask(home.epoch_key, calls.deadline_s(), "exist", keys=[])
        begin_s = time.perf_counter()
        calls.ask(home.epoch_key, calls.deadline_s(), "exist", keys=[home.epoch_key])
        return time.perf_counter() - begin_s


def _page(target: MooncakeTarget, path: str, deadline_s: float) -> str:
    """Read a page, on a thread that is left behind if it takes too long, as a byte a second would not end."""
    place = f"http://{target.host}:{target.http_port}"
    reading = start_aside("mooncake", "page", lambda: _read(target, path))
    try:
        status, body = reading.result(max(0.0, deadline_s - time.monotonic()))
    except (OSError, http.client.HTTPException) as error:  # a time-out, too
        why = str(error) or f"it takes more than {target.timeout_s} s"
        raise TierError(f"the master's pages at {place} cannot be read: {why}: set http_port in the URL") from error
    if status != http.client.OK:
        raise TierError(f"the master's page {place}{path} answers {status}: set http_port in the URL")
    return body


def _read(target: MooncakeTarget, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(target.host, target.http_port, timeout=target.timeout_s)) as pages:
        pages.request("GET", path)
        response = pages.getresponse()
        return response.status, response.read(_MOST_BYTES).decode(errors="replace")
