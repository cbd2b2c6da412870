"""Table of a decode engine's wait for KV that does not arrive, beyond the time at which it could have known.

    PYTHONPATH=tests python tests/e2e/handover_faults.py

It runs two real vLLMs on the CPU, in float32 with one core each, over a connection that fails. The wait is vLLM's own
queue time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import zmq
from support.disaggregated import Disaggregation
from support.redis_server import wait_for
from support.relay import Mood, Relay

from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.progress import BEAT_S, SILENT_BEATS
from kvstore.server.embedded import EmbeddedOptions, EmbeddedServer
from kvstore.testing.harness import EVEN
from kvstore.tiers.server.connection import ServerConnection
from kvstore.tiers.server.url import parse_server
from kvstore.tools.models import TINY, build_llama, random_tokens
from kvstore.tools.processes import free_port

CHUNK_TOKENS = 64
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
NUM_CHUNKS = 8  # room of the decode engine
SHORT, LONG = 7 * CHUNK_TOKENS + 2, 14 * CHUNK_TOKENS + 2
SLOW_S = 0.2  # for each 64 KiB of the transfer
MOST_S = 60.0  # for the whole transfer
LINES = f"""
enable_pd: true
pd_timeout_ms: 60000
blocking_timeout_secs: 20
max_local_cpu_size: 0.25
load_only_if_faster: false
chunk_size: {CHUNK_TOKENS}
"""


class Measured(NamedTuple):
    """Times of one request.

    Attributes:
        wait_s: time from its arrival at the decode engine until it was scheduled.
        beyond_s: part of this after the engine could have known that no more KV arrives, or that all has arrived.
    """

    wait_s: float
    beyond_s: float


class Trial:
    """Both engines, and the connection between them."""

    def __init__(self, running: Disaggregation, relay: Relay, port: int) -> None:
        self.running, self.relay, self.port = running, relay, port
        self._seed = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection = ServerConnection(self._context, parse_server(f"kvs://127.0.0.1:{port}", {}))

    def server(self) -> dict[str, Any]:
        """Return the stats of the decode engine's server."""
        answer = self._connection.ask(messages.Stats(self._connection.new_serial()), messages.Report)
        tree: dict[str, Any] = json.loads(answer.body)
        return tree

    def stored(self) -> int:
        """Return the number of chunks that have arrived there so far."""
        return sum(int(space["counters"]["stored_chunks"]) for space in self.server()["namespaces"])

    def wait_of(self, num_tokens: int, meanwhile: Callable[[], float], *, hands_over: bool = True) -> Measured:
        """Hand a prompt over, and decode it; ``meanwhile`` returns the time at which the engine could have known."""
        self._seed += 1
        prompt = random_tokens(num_tokens, vocab=TINY.vocab, seed=self._seed)
        to = {"req_id": "r", "receiver_host": "127.0.0.1", "receiver_init_port": self.relay.port}
        told = self._ask(self.running.prefill.url, prompt, {"disagg_spec": {**to, "receiver_alloc_port": 1}})
        said = (told.get("kv_transfer_params") or {}).get("disagg_spec")
        if not hands_over:
            said = None
        if said is not None:  # the engine's own port instead of the relay's
            said = {**said, "receiver_init_port": self.port}
        before_s, count = self._queued()
        known: list[float] = []
        watching = threading.Thread(target=lambda: known.append(meanwhile()))
        begin_s = time.monotonic()
        watching.start()
        self._ask(self.running.decode.url, prompt, {} if said is None else {"disagg_spec": said})
        watching.join()
        assert known, "what was waited for has not come"
        wait_for("vLLM counts", lambda: self._queued()[1] == count + 1)
        wait_s = self._queued()[0] - before_s
        return Measured(wait_s, begin_s + wait_s - max(begin_s, known[0]))

    def _ask(self, url: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.running.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        with httpx.Client(trust_env=False, timeout=120) as client:
            answer = client.post(f"{url}/v1/completions", json={**body, "kv_transfer_params": params})
        assert answer.status_code == 200, answer.text
        tree: dict[str, Any] = answer.json()
        return tree

    def _queued(self) -> tuple[float, int]:
        """Return the seconds that requests of the decode engine have waited so far, and their number."""
        with httpx.Client(trust_env=False, timeout=30) as client:
            lines = client.get(f"{self.running.decode.url}/metrics").text.splitlines()
        found = {
            name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}"))
            for name in ("request_queue_time_seconds_sum", "request_queue_time_seconds_count")
        }
        total_s, count = found.values()
        return total_s, int(count)

    def settle(self) -> None:
        """Repair the connection, and let the prefill engine detect it."""
        self.relay.mood = Mood.FAST
        self.relay.aim(self.port)
        time.sleep(11)
        self.wait_of(SHORT, time.monotonic)

    def close(self) -> None:
        """Close the connection to the decode engine's server."""
        self._connection.close()
        self._context.destroy(linger=0)


def alone(trial: Trial) -> Measured:
    """Measure a request without a hand-over, which is the least wait on this machine."""
    return trial.wait_of(SHORT, time.monotonic, hands_over=False)


def slow(trial: Trial) -> Measured:
    """Measure a slow transfer, whose end is known when the last chunk has arrived."""
    trial.relay.mood = Mood.SLOW
    wanted = trial.stored() + SHORT // CHUNK_TOKENS

    def all_there() -> float:
        deadline_s = time.monotonic() + MOST_S
        while trial.stored() < wanted:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{wanted - trial.stored()} chunks have not come within {MOST_S} s")
            time.sleep(0.005)
        return time.monotonic()

    return trial.wait_of(SHORT, all_there)


def full(trial: Trial) -> Measured:
    """Measure refused chunks, which are known before the prompt's answer."""
    return trial.wait_of(LONG, time.monotonic)


def refusing(trial: Trial, foreign: EmbeddedServer) -> Measured:
    """Measure a hand-over to the server of a foreign engine, which refuses it."""
    trial.relay.aim(foreign.port)
    return trial.wait_of(SHORT, time.monotonic)


def hung(trial: Trial) -> Measured:
    """Measure a connection that hangs without being closed, which is known after a time of silence."""
    trial.relay.mood = Mood.HUNG

    def silent() -> float:
        return trial.relay.passed_s + SILENT_BEATS * BEAT_S

    return trial.wait_of(SHORT, silent)


def dying(trial: Trial) -> Measured:
    """Measure a prefill engine that is killed during the transfer."""
    trial.relay.mood = Mood.SLOW

    def killed() -> float:
        time.sleep(0.3)
        trial.running.prefill.kill()
        trial.relay.aim(trial.port)  # as the kernel closes a direct connection
        return time.monotonic()

    measured = trial.wait_of(SHORT, killed)
    trial.running.prefill.start()
    return measured


@contextmanager
def opened(folder: Path) -> Iterator[Trial]:
    """Start both engines, with room for eight chunks."""
    model = build_llama(folder / "model", TINY)
    port = free_port()
    room = f"pd_buffer_size: {NUM_CHUNKS * CHUNK_TOKENS * TOKEN_BYTES}\n"
    decode = f"{LINES}{room}pd_peer_init_port: {port}\n"
    uncached = ("--no-enable-prefix-caching",)
    prefill = f"{LINES}pd_buffer_size: {256 << 20}\n"
    running = Disaggregation(model, folder, prefill=prefill, decode=decode, arguments=uncached)
    with running, Relay(port) as relay, closing(Trial(running, relay, port)) as trial:
        relay.slow_s = SLOW_S
        yield trial


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    foreign = EmbeddedServer(Namespace({"model": "another"}), EVEN, EmbeddedOptions(1 << 20, "127.0.0.1", 0))
    with tempfile.TemporaryDirectory() as folder, closing(foreign), opened(Path(folder)) as trial:
        trial.settle()
        faults: dict[str, Callable[[], Measured]] = {
            "alone": lambda: alone(trial),
            "full": lambda: full(trial),
            "slow": lambda: slow(trial),
            "refusing": lambda: refusing(trial, foreign),
            "hung": lambda: hung(trial),
            "dying": lambda: dying(trial),
        }
        print(f"{'receiver':10} {'wait':>8} {'beyond':>8} {'most':>8}   leases left", flush=True)
        for name in given.only or faults:
            measure, found = faults[name], []
            for _ in range(given.rounds):
                found.append(measure())
                trial.settle()
            wait_s = statistics.median(one.wait_s for one in found)
            beyond_s = statistics.median(one.beyond_s for one in found)
            most_s = max(one.beyond_s for one in found)
            leases = trial.server()["leases"]
            print(f"{name:10} {wait_s:6.3f} s {beyond_s:6.3f} s {most_s:6.3f} s   {leases}", flush=True)


if __name__ == "__main__":
    main()
