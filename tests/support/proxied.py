"""A proxy in this process, and requests of tests to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvstore.ops.http_limits import entrance
from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.options import ProxyOptions
from kvstore.tools.proxy.process import Proxy
from kvstore.tools.vllmclient import read_counter
from support.fake_engine import HttpThread

PATH = "/v1/completions"
ASKED = {"model": "m", "prompt": "hello", "max_tokens": 7, "temperature": 0.5}
STREAMED = {**ASKED, "stream": True}
TO_A, TO_B = Receiver("10.0.0.1", 5001), Receiver("10.0.0.2", 5002)


class ProxyThread(HttpThread):
    """A proxy in this process."""

    def __init__(self, options: ProxyOptions) -> None:
        options.check()
        self.proxy = Proxy(options)
        protocol = entrance(options.max_connections, options.timeout_s)
        super().__init__(self.proxy.app, loop="uvloop", http=protocol, proxy_headers=False)

    def __enter__(self) -> httpx.Client:
        self.start()
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=30, verify=False)
        return self.client

    def __exit__(self, *_error: object) -> None:
        self.client.close()
        self.stop()


def counted(client: httpx.Client, name: str, **labels: str) -> int:
    """Return the value of a metric of the proxy; 0 if it is missing."""
    return read_counter(str(client.base_url).rstrip("/"), f"kvstore_proxy_{name}", labels)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    tree: dict[str, Any] = answer.json()["error"]
    assert tree.keys() == {"message", "type", "param", "code"}
    assert tree["code"] == answer.status_code
    return tree


@contextmanager
def send_raw(client: httpx.Client, content: bytes) -> Iterator[socket.socket]:
    """Yield a connection that sends a request, reads nothing, and is closed at the end."""
    url = client.base_url
    with socket.create_connection((url.host, url.port or 0)) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        yield connection
