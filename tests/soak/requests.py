"""Malformed HTTP requests to the proxy, to an engine's admin port and to a cache server's pages."""

from __future__ import annotations

import logging
import random
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx
import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from support.cache_server import ServerProcess, short_folder
from support.fake_engine import FakeEngine
from support.fake_parts import Setup
from support.fake_vllm import FakeVllm
from support.malformed_http import Target, malformed
from support.proxied import ASKED, PATH, STREAMED, ProxyThread, counted
from support.redis_server import wait_for

from kvstore.adapters.vllm.scheduler.operator import SchedulerControls
from kvstore.config import StoreConfig
from kvstore.ops.admin_http import AdminServer
from kvstore.tools.processes import free_port
from kvstore.tools.proxy.options import ProxyOptions
from soak.memory import own_bytes
from soak.part import Batch, Do, Part

REQUESTS: Final = 1_800  # of a batch
TOGETHER: Final = 60
_WAIT_S: Final = 0.3  # for answers to requests that may not be complete
_MAX_ANSWER_BYTES: Final = 1 << 16
_CHAT: Final = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
_KV: Final = {**ASKED, "kv_transfer_params": {"kvstore.pin": True, "disagg_spec": {"receiver_host": "h"}}}
_PROXIED: Final = (PATH, "/v1/chat/completions", "/v1/messages", "/v1/models", "/tokenize", "/health", "/metrics")
_ADMIN: Final = ("/kv", "/info", "/stats", "/config", "/health", "/healthz", "/pins", "/clear", "/unpin", "/drain")
_PAGES: Final = ("/", "/metrics", "/healthz", "/readyz", "/status.json", "/reload", "/drain")


class CalmEngine(FakeEngine):
    """Engine that answers anything, and remembers nothing."""

    async def _answer(self, request: Request) -> Response:
        await request.body()
        return JSONResponse(self.script.answer)


class Complaints(logging.Handler):
    """Errors with a trace, which no request may cause."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what has a trace."""
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def exchange(target: Target, requests: Sequence[bytes]) -> Counter[str]:
    """Send requests at the same time, each on its own connection; return the statuses of what was answered in time."""
    answers: dict[socket.socket, bytearray] = {}
    statuses = Counter[str]()
    with selectors.DefaultSelector() as selector:
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", target.port), timeout=10)
            answers[connection] = bytearray()
            with suppress(OSError):  # cut off before it was all sent
                connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        end_s = time.monotonic() + _WAIT_S
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                asked = key.fileobj
                assert isinstance(asked, socket.socket)
                if not _take(asked, answers[asked]):
                    selector.unregister(asked)
    for connection, answer in answers.items():
        connection.close()
        statuses[_status(bytes(answer))] += 1
    return statuses


def _take(connection: socket.socket, answer: bytearray) -> bool:
    """Receive a piece; False at the end."""
    try:
        piece = connection.recv(1 << 16)
    except BlockingIOError:
        return True
    except OSError:
        return False
    answer += piece
    return bool(piece) and len(answer) < _MAX_ANSWER_BYTES


def _status(answer: bytes) -> str:
    if not answer:
        return "none"
    is_http = answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")) and answer[9:12].isdigit()
    return answer[9:12].decode() if is_http else f"not HTTP: {answer[:40]!r}"


def judge(statuses: Counter[str], complaints: list[str]) -> list[str]:
    """Return what may not be: an error of the server's own, or an answer that is none."""
    bad = [f"{number} answers {status}" for status, number in statuses.items() if status == "500" or len(status) > 4]
    return bad + complaints


class Servers:
    """The three servers, each with a good request that is always answered."""

    def __init__(self, stack: ExitStack) -> None:
        self._engines = [CalmEngine().start() for _ in range(2)]
        for engine in self._engines:
            stack.callback(engine.stop)
        self.proxy = stack.enter_context(
            ProxyThread(ProxyOptions((self._engines[0].url,), (self._engines[1].url,), timeout_s=20))
        )
        vllm = FakeVllm(Setup())
        stack.callback(vllm.close)
        admin = stack.enter_context(
            closing(AdminServer(SchedulerControls(vllm.scheduler, StoreConfig(), {}), "127.0.0.1", 0))
        )
        pages_port = free_port()
        self._server = ServerProcess(stack.enter_context(short_folder()), f"server_http_port: {pages_port}\n")
        stack.callback(self._server.kill)
        self._server.start()
        self.targets = (
            Target(self.proxy.base_url.port or 0, _PROXIED, (ASKED, STREAMED, _CHAT, _KV)),
            Target(admin.port, _ADMIN, ({"tokens": [1, 2, 3], "salt": "a", "tags": {"tenant": "a"}},)),
            Target(pages_port, _PAGES, ({},)),
        )

    def check(self) -> None:
        """Check that everybody else is served as before, and nothing is left under way."""
        assert self.proxy.post(PATH, json=ASKED).json() == self._engines[0].script.answer
        wait_for("the proxy is idle", lambda: counted(self.proxy, "in_flight") == 0)
        for target, path in zip(self.targets[1:], ("/info", "/status.json"), strict=True):
            answer = httpx.get(f"http://127.0.0.1:{target.port}{path}", trust_env=False, timeout=30)
            assert answer.status_code == 200, f"{path}: {answer.status_code}"
        assert b"Traceback" not in self._server.log.read_bytes(), self._server.log.read_text()[-2000:]


@contextmanager
def opened(_: Path) -> Iterator[Do]:
    """Yield batches of requests to the three servers."""
    complaints = Complaints()
    with ExitStack() as stack:
        servers = Servers(stack)
        logging.getLogger().addHandler(complaints)
        logging.getLogger("kvstore.ops").setLevel(logging.ERROR)
        stack.callback(logging.getLogger().removeHandler, complaints)

        def send(seed: int) -> Batch:
            dice = random.Random(seed)
            statuses = Counter[str]()
            for number in range(REQUESTS // TOGETHER):
                target = servers.targets[number % len(servers.targets)]
                statuses += exchange(target, [malformed(target, dice) for _ in range(TOGETHER)])
            servers.check()
            bad = judge(statuses, complaints.found)
            complaints.found = []
            answered = {f"answered {family}xx": _of(statuses, family) for family in "245"}
            notes = answered | {"not answered": statuses["none"]}
            return Batch(REQUESTS, len(bad), "; ".join(bad), notes, [own_bytes(psutil.Process())])

        yield send


def _of(statuses: Counter[str], family: str) -> int:
    return sum(number for status, number in statuses.items() if status.startswith(family))


PART = Part("requests", "malformed HTTP requests", 100_000, opened)
