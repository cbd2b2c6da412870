"""A name server in this process, over UDP and TCP at a loopback port, whose records a test changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final, Self

from dnslib import AAAA, QTYPE, RCODE, RR, SRV, A
from dnslib.server import BaseResolver, DNSHandler, DNSLogger, DNSRecord, DNSServer

_POLL_S: Final = 0.02  # for its end
_TRIES: Final = 20


class NameServer(BaseResolver):  # type: ignore[misc]
    """Answers from ``records``: addresses by host, targets (host and port) by service. A context manager.

    Attributes:
        records: of each name.
        fails: answer SERVFAIL.
        asked: number of questions.
        port: on which it listens.
    """

    def __init__(self, records: Mapping[str, list[str] | list[tuple[str, int]]]) -> None:
        self.records = dict(records)
        self.fails = False
        self.asked = 0
        quiet = DNSLogger("-request,-reply,-truncated,-error,-recv,-send,-data")
        for _ in range(_TRIES):
            udp = DNSServer(self, port=0, address="127.0.0.1", logger=quiet)
            self.port = int(udp.server.server_address[1])
            try:
                tcp = DNSServer(self, port=self.port, address="127.0.0.1", logger=quiet, tcp=True)
            except OSError:  # another program has that port
                udp.server.server_close()
            else:
                self._servers = [udp.server, tcp.server]
                return
        raise OSError("no port is free for both protocols")

    def __enter__(self) -> Self:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="test-names", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

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
