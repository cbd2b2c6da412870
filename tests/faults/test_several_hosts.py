"""An engine of two workers on two hosts: real processes and cache servers in two network namespaces.

Paths mean another place on each host, so the same configuration names two servers and two folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.gate import HANG_GUARD_S
from support.handed_over import Wire, answered, flush
from support.two_hosts import TwoHosts, two_hosts
from support.worker_process import PROBE_INTERVAL_S, ProcessSetup, ProcessVllm

from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.engine import opening
from kvstore.engine.options import RemoteOptions
from kvstore.handover.tcp import open_transport
from kvstore.handover.transport import Transport
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.keyfiles import read_list, read_pair
from kvstore.server.embedded import EmbeddedOptions
from kvstore.tools.processes import free_port

pytestmark = pytest.mark.sweep

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1
TRIES = 200

Build = Callable[..., ProcessVllm]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setattr(opening, "PROBE_INTERVAL_S", PROBE_INTERVAL_S)
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def build(hosts: TwoHosts) -> Iterator[Build]:
    """Yield a function that makes engines that keep nothing themselves: the second worker is on the far host."""
    engines: list[ProcessVllm] = []

    def words(rank: int, command: Sequence[str]) -> list[str]:
        return hosts.host.words(command, binds=hosts.binds) if rank else list(command)

    def build_(**how: Any) -> ProcessVllm:
        settings = {**hosts.keys, "timeout_s": 2.0}
        setup = ProcessSetup(
            ranks=2,
            remote=RemoteOptions(f"kvs+ipc://{hosts.run}", settings, lookup_timeout_s=1.0, hold_s=0.0, max_queue=64),
            max_write_queue=64,
            local_cpu=False,
            folder_of_caches=hosts.folder / "caches",
            words=words,
            reached=(None, hosts.far_url),
        )
        engines.append(ProcessVllm(replace(setup, **how)))
        return engines[-1]

    yield build_
    for engine in engines:
        engine.close()


def loaded(vllm: ProcessVllm, name: str) -> int:
    """Ask with vLLM's own cache empty. Returns the tokens loaded."""
    vllm.forget_local()
    vllm.ask(name, PROMPT)
    vllm.settle()
    return vllm.loaded_tokens[name]


def filled(build: Build, **setup: Any) -> ProcessVllm:
    """Return an engine that has stored all of the prompt."""
    vllm = build(**setup)
    vllm.ask("first", PROMPT)
    vllm.settle()
    return vllm


def assert_back(vllm: ProcessVllm) -> None:
    assert any(loaded(vllm, f"back {number}") == WHOLE for number in range(TRIES))


def loads_of(vllm: ProcessVllm) -> list[int]:
    """Return the chunks that each worker has loaded from its server."""
    return [worker.loaded() for worker in vllm.workers]  # type: ignore[attr-defined]


def test_each_worker_uses_its_hosts_server_and_what_cannot_be_asked_is_missing(hosts: TwoHosts, build: Build) -> None:
    """While the cable is cut, nobody can ask for the far parts, although they are there."""
    vllm = filled(build)
    assert loaded(vllm, "again") == WHOLE
    assert loads_of(vllm) == [4, 4]
    hosts.host.cut()
    assert loaded(vllm, "cut") == 0
    assert loaded(vllm, "still cut") == 0
    hosts.host.mend()
    assert_back(vllm)
    hosts.kill_far_server()
    assert loaded(vllm, "no server there") == 0
    hosts.start_far_server()
    assert_back(vllm)
    assert vllm.recovered == 0, "nothing was promised in vain"
    vllm.assert_nothing_leaked()


def test_another_engine_finds_both_parts_and_misses_them_without_the_near_one(hosts: TwoHosts, build: Build) -> None:
    filled(build).close()
    reader = build()
    assert loaded(reader, "another engine") == WHOLE
    assert loads_of(reader) == [4, 4]
    hosts.near_server.kill()
    assert loaded(reader, "half is gone") == 0
    hosts.near_server.start()
    assert_back(reader)
    reader.assert_nothing_leaked()


def test_a_host_that_is_lost_and_comes_back(hosts: TwoHosts, build: Build) -> None:
    """As with vLLM, an engine ends with its worker, and a new one begins. The far server has a disk."""
    vllm = filled(build)
    hosts.end_far_server()  # which writes all to its disk
    vllm.workers[1].kill()  # type: ignore[attr-defined]
    hosts.host.cut()
    with pytest.raises((EOFError, OSError)):
        vllm.ask("no worker there", PROMPT)
    vllm.close()
    hosts.host.mend()
    hosts.start_far_server()
    again = build()
    assert loaded(again, "on the disk of the far server") == WHOLE
    again.assert_nothing_leaked()


def test_folders_are_those_of_each_host(hosts: TwoHosts, build: Build) -> None:
    disk = hosts.disk / "worker"
    vllm = filled(build, disk=disk, reached=(None, None))
    assert loaded(vllm, "from disk") == WHOLE
    assert loads_of(vllm) == [0, 0], "nobody can ask the far server"
    files = [sorted(path.name for path in home.rglob("*.safetensors")) for home in (disk, hosts.binds[hosts.disk])]
    assert files[0] == files[1] != []
    vllm.close()
    restarted = build(disk=disk, reached=(None, None))
    assert loaded(restarted, "after a restart") == WHOLE
    restarted.assert_nothing_leaked()


class WithKeys(Wire):
    """A wire of an engine that has a key."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        super().__init__()
        self._keys = keys

    def connect(self, url: str, namespace: Namespace, layout: KVLayout, _: Mapping[str, object]) -> Transport:
        return open_transport(url, namespace, layout, {"timeout_s": 5.0, **self._keys})


def test_kv_is_handed_over_to_the_worker_of_each_host(hosts: TwoHosts, build: Build) -> None:
    addresses, folder = (hosts.host.near, hosts.host.far), hosts.folder
    port = free_port()
    locks: dict[str, Any] = {"keys": read_pair(folder / "server.key"), "listed": read_list(folder / "clients")}
    decode = build(
        remote=RemoteOptions(None, peers=(), peer_settings=hosts.keys, lookup_timeout_s=5.0, hold_s=0.2, max_queue=64),
        saves=False,
        handover=HandoverOptions(receives=True, own=(hosts.host.near, port), timeout_s=HANG_GUARD_S),
        servers=[EmbeddedOptions(8 << 20, host, port + rank, **locks) for rank, host in enumerate(addresses)],
        reached=[f"kvs://{host}:{port + rank}" for rank, host in enumerate(addresses)],
    )
    sends = HandoverOptions(sends=True, allows_host=addresses.__contains__)
    wire: Any = WithKeys(hosts.keys)
    with closing(FakeVllm(Setup(ranks=2, handover=sends, receiver=wire))) as prefill:
        spec = DisaggSpec("client", ",".join(addresses), (port, port + 1))
        request = prefill.ask("prefill", PROMPT, handover=Handover(spec))
        decode.ask("decode", PROMPT, handover=answered(request))
        flush(prefill)
    assert decode.loaded_tokens["decode"] == WHOLE
    assert loads_of(decode) == [4, 4]
    decode.settle()
    decode.assert_nothing_leaked()
