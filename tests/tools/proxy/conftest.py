"""Fixtures of the proxy's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, fake_engines
from support.proxied import ProxyThread

from kvstore.tools.proxy.options import ProxyOptions

Serve = Callable[..., httpx.Client]


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with fake_engines(4) as engines:
        yield engines


@pytest.fixture
def prefill(engines: list[FakeEngine]) -> FakeEngine:
    return engines[0]


@pytest.fixture
def decode(engines: list[FakeEngine]) -> FakeEngine:
    return engines[1]


@pytest.fixture
def serve(prefill: FakeEngine, decode: FakeEngine) -> Iterator[Serve]:
    """Yield a function that starts a proxy in front of one engine of each kind, or of others."""
    proxies: list[ProxyThread] = []

    def serve_(**options: Any) -> httpx.Client:
        basic = ProxyOptions((prefill.url,), (decode.url,), health_interval_s=0.1, timeout_s=20)
        proxy = ProxyThread(replace(basic, **options))
        proxies.append(proxy)
        return proxy.__enter__()

    yield serve_
    for proxy in proxies:
        proxy.__exit__()
