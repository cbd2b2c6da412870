"""Contents of a Mooncake Store, for tools: by the pages that its master serves over HTTP, and a call of its client."""

from __future__ import annotations

import http.client
import re
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import Final, NamedTuple

from kvstore.model.errors import TierError
from kvstore.tiers.mooncake.calls import Calls
from kvstore.tiers.mooncake.child import PAGE_BYTES
from kvstore.tiers.mooncake.names import Home
from kvstore.tiers.mooncake.url import MooncakeTarget

_MOST_BYTES: Final = 1 << 28  # of a page; a million keys take 80 MB
_CHUNK: Final = re.compile(r"kvs:([0-9a-f]{16}):([0-9a-f]{16}):[0-9a-f]{32}-\d+")
_USED: Final = re.compile(r"^(Used|Capacity)\(bytes\)\s*:\s*(\d+)$", re.MULTILINE)


class Segment(NamedTuple):
    """Memory that a host gives to the store."""

    name: str
    used_bytes: int
    capacity_bytes: int


def segments(target: MooncakeTarget) -> list[Segment]:
    """Return the memory of the store.

    Raises:
        TierError: the master serves no pages.
    """
    found = []
    for name in _page(target, "/get_all_segments").split():
        sizes = dict(_USED.findall(_page(target, f"/query_segment?segment={name}")))
        found.append(Segment(name, int(sizes.get("Used", 0)), int(sizes.get("Capacity", 0))))
    return found


def count_chunks(target: MooncakeTarget) -> Counter[tuple[str, str]]:
    """Return the number of chunks of each namespace and epoch.

    Raises:
        TierError: the master serves no pages.
    """
    return Counter(match.groups() for match in _CHUNK.finditer(_page(target, "/get_all_keys")))  # type: ignore[misc]


def answer_s(target: MooncakeTarget) -> float:
    """Return the seconds that the master takes for an answer to a client, which is started for it.

    Raises:
        TierError: it does not answer, or Mooncake cannot be loaded.
    """
    home = Home(bytes(8), "0" * 16)
    with closing(Calls(replace(target, segment_mib=0), PAGE_BYTES)) as calls:  # as its memory would be lost at once
        calls.ask(home.epoch_key, calls.deadline_s(), "exist", keys=[])
        begin_s = time.perf_counter()
        calls.ask(home.epoch_key, calls.deadline_s(), "exist", keys=[home.epoch_key])
        return time.perf_counter() - begin_s


def _page(target: MooncakeTarget, path: str) -> str:
    place = f"http://{target.host}:{target.http_port}"
    try:
        with closing(http.client.HTTPConnection(target.host, target.http_port, timeout=target.timeout_s)) as pages:
            pages.request("GET", path)
            response = pages.getresponse()
            if response.status == http.client.OK:
                return response.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise TierError(f"the master's pages at {place} cannot be read: {error}: set http_port in the URL") from error
    raise TierError(f"the master's page {place}{path} answers {response.status}: set http_port in the URL")
