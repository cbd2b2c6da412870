"""Prefill and decode engines with a proxy in front of them, as processes, and requests of tests to them."""

from __future__ import annotations

import signal
import socket
from typing import Any

import httpx

from kvstore.tools import vllmclient
from kvstore.tools.demo import pair
from kvstore.tools.demo.pair import EngineServer, ProxyServer
from support.vllm_engine import Prompt, whole_blocks

STOP_WAIT_S = 60.0
PATIENT = "lookup_timeout_ms: 60000\nblocking_timeout_secs: 60\n"  # configuration for a busy machine


class ProxyProcess(ProxyServer):
    """``kvstore proxy`` as a process that can be signalled."""

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """Return its exit code."""
        assert self._process is not None
        return self._process.wait(STOP_WAIT_S)


class Disaggregation(pair.Disaggregation):
    """Both engines and the proxy, with requests for whole answers."""

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer through the proxy, decoded greedily."""
        asked = {"model": self.model, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False, **body}
        with httpx.Client(trust_env=False, timeout=300) as asker:
            answer = asker.post(f"{self.proxy.url}{path}", json=asked)
        assert answer.status_code == 200, answer.text
        tree: dict[str, Any] = answer.json()
        return tree


class Work(vllmclient.Work):
    """Prompt tokens that an engine computes from now on."""

    def __init__(self, engine: EngineServer) -> None:
        super().__init__(engine.url)


def unshared(prompt: Prompt) -> int:
    """Count the tokens left to compute of a prompt whose whole blocks are all there."""
    return len(prompt) - whole_blocks(len(prompt))
