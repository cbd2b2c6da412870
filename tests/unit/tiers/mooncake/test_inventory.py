"""Tests of what tools read on the pages of Mooncake's master, which may be anybody's server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from kvstore.model.errors import TierError
from kvstore.tiers.mooncake.inventory import Segment, describe, segments
from kvstore.tiers.mooncake.url import MooncakeTarget

NAME = "a&segment=b#/ü:1"


class Pages(BaseHTTPRequestHandler):
    """Pages of a master with two segments, one of them with an odd name, and three chunks."""

    drips: threading.Event | None = None

    def do_GET(self) -> None:
        if self.drips is not None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            while not self.drips.wait(0.05):
                self.wfile.write(b"x")
            return
        parts = urlsplit(self.path)
        if parts.path == "/get_all_segments":
            body = f"here:1\n{NAME}\n"
        elif parts.path == "/query_segment":
            (name,) = parse_qs(parts.query)["segment"]
            used = {"here:1": 1, NAME: 2}[name]
            body = f"{name}\nUsed(bytes): {used}\nCapacity(bytes) : 10\n"
        elif parts.path == "/get_all_keys":
            keys = [
                f"kvs:{'0' * 16}:{epoch * 16}:{'a' * 32}-{number}" for epoch, number in (("1", 1), ("1", 2), ("2", 1))
            ]
            body = "\n".join([*keys, f"kvs:{'0' * 16}:epoch", "other"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


@contextmanager
def a_master() -> Iterator[MooncakeTarget]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield MooncakeTarget("127.0.0.1", 1, http_port=server.server_address[1], timeout_s=0.5)
        finally:
            server.shutdown()
            serving.join()


def test_names_are_quoted() -> None:
    with a_master() as target:
        assert segments(target) == [Segment("here:1", 1, 10), Segment(NAME, 2, 10)]


def test_chunks_are_counted_by_namespace_and_epoch() -> None:
    with a_master() as target:
        found = describe(target)["namespaces"]
    assert [(one["epoch"], one["chunks"]) for one in found] == [("1" * 16, 2), ("2" * 16, 1)]


def test_a_page_that_drips_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the page would take a minute."""
    is_over = threading.Event()
    monkeypatch.setattr(Pages, "drips", is_over)
    with a_master() as target:
        try:
            with pytest.raises(TierError, match=r"takes more than 0\.5 s"):
                segments(target)
        finally:
            is_over.set()
