"""A name server in this process, over UDP and TCP at a loopback port, whose records a test changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, Self

from dnslib import AAAA, QTYPE, RCODE, RR, SRV, A
from dnslib.server import BaseResolver, DNSHandler, DNSLogger, DNSRecord, DNSServer

_POLL_S: Final = 0.02  # for its end


class NameServer(BaseResolver):  # type: ignore[misc]
    """Answers from ``records``: addresses by host, targets (host and port) by service. A context manager.

    Attributes:
        records: of each name.
        fails: answer SERVFAIL.
        asked: number of questions.
    """

    def __init__(self, records: Mapping[str, list[str] | list[tuple[str, int]]]) -> None:
        self.records = dict(records)
        self.fails = False
        self.asked = 0
        quiet = DNSLogger("-request,-reply,-truncated,-error,-recv,-send,-data")
        self._servers = [DNSServer(self, port=0, address="127.0.0.1", logger=quiet)]
        port = self.port
        self._servers.append(DNSServer(self, port=port, address="127.0.0.1", logger=quiet, tcp=True))

    @property
    def port(self) -> int:
        """Port on which it listens."""
        return int(self._servers[0].server.server_address[1])

    def __enter__(self) -> Self:
        for server in self._servers:
            threading.Thread(
                target=server.server.serve_forever, args=(_POLL_S,), name="test-names", daemon=True
            ).start()
        return self

    def __exit__(self, *_error: object) -> None:
        for server in self._servers:
            server.server.shutdown()
            server.server.server_close()

    def resolve(self, request: DNSRecord, _handler: DNSHandler) -> DNSRecord:
        """Answer a question, as the library asks for it."""
        self.asked += 1
        reply, name = request.reply(), str(request.q.qname).rstrip(".")
        if self.fails or name not in self.records:
            reply.header.rcode = RCODE.SERVFAIL if self.fails else RCODE.NXDOMAIN
            return reply
        for record in self.records[name]:
            kind, data = _typed(record)
            if kind == QTYPE[request.q.qtype]:
                reply.add_answer(RR(request.q.qname, request.q.qtype, rdata=data, ttl=0))
        return reply


def _typed(record: str | tuple[str, int]) -> tuple[str, A | AAAA | SRV]:
    if isinstance(record, tuple):
        return "SRV", SRV(0, 0, record[1], record[0])
    return ("AAAA", AAAA(record)) if ":" in record else ("A", A(record))
