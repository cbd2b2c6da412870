"""Hand-overs to an engine whose workers are on several hosts, over real sockets; `support/fake_vllm.py` checks them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace

import pytest
from support.fake_parts import BLOCK, CHUNK, Setup
from support.fake_vllm import FakeVllm
from support.handed_over import HOST, NEVER_S, Wire, answered, flush

from kvstore.adapters.vllm.plan import WorkerFacts
from kvstore.adapters.vllm.requests.params import DisaggSpec, Handover, Source
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions, Handovers
from kvstore.adapters.vllm.scheduler.steps import StepTracker
from kvstore.handover.transport import Transport
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tools.processes import free_port

PROMPT = list(range(3 * CHUNK + 2 * BLOCK + 1))  # three chunks, a tail of two blocks, one token
WHOLE = len(PROMPT) - 1
OTHER_NAME = "localhost"  # of the second host


class OnTwoHosts(FakeVllm):
    """Engine whose second worker is on another host, where its own processes' folder does not exist."""

    def _facts(self, rank: int) -> WorkerFacts:
        facts = super()._facts(rank)
        url = f"kvs://{HOST}:{(self.setup.port or 0) + rank}"
        return replace(facts, host="far", server_url="kvs+ipc:///nowhere", remote_url=url) if rank else facts


class NotingWire(Wire):
    """Wire that notes the addresses to which it leads."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: set[str] = set()

    def connect(self, url: str, namespace: Namespace, layout: KVLayout, settings: Mapping[str, object]) -> Transport:
        self.urls.add(url)
        return super().connect(url, namespace, layout, settings)


@pytest.fixture
def decode() -> Iterator[OnTwoHosts]:
    port = free_port()
    options = HandoverOptions(receives=True, own=(HOST, port), timeout_s=NEVER_S)
    with closing(OnTwoHosts(Setup(handover=options, port=port, ranks=2, saves=False))) as engine:
        yield engine


def prefill(wire: NotingWire, *hosts: str) -> FakeVllm:
    options = HandoverOptions(sends=True, allows_host=lambda host: host in hosts)
    return FakeVllm(Setup(handover=options, receiver=wire, ranks=2))  # type: ignore[arg-type]


def to_both(decode: FakeVllm) -> Handover:
    port = decode.setup.port or 0
    return Handover(DisaggSpec("client", f"{HOST},{OTHER_NAME}", (port, port + 1)))


def test_each_rank_sends_to_its_host_and_all_of_it_is_found(decode: OnTwoHosts) -> None:
    wire = NotingWire()
    with closing(prefill(wire, HOST, OTHER_NAME)) as first:
        request = first.ask("prefill", PROMPT, handover=to_both(decode))
        decode.ask("decode", PROMPT, handover=answered(request))
        flush(first)
    port = decode.setup.port or 0
    assert wire.urls == {f"kvs://{HOST}:{port}", f"kvs://{OTHER_NAME}:{port + 1}"}
    assert decode.loaded_tokens["decode"] == WHOLE
    assert decode.recovered == 0
    decode.settle()
    decode.assert_nothing_leaked()


@pytest.mark.parametrize(
    ("sends_to_peers", "host", "is_sent"),
    [(True, HOST, True), (False, HOST, False), (True, OTHER_NAME, False)],
    ids=["named now", "hosts are listed", "not named"],
)
def test_a_host_is_allowed_while_dns_names_it_as_a_peer(*, sends_to_peers: bool, host: str, is_sent: bool) -> None:
    """The peers of this moment count, with their ports for sources. A listed host needs no peers."""
    now = {(HOST, 7300)}
    options = HandoverOptions(sends=True, sends_to_peers=sends_to_peers, reads_from_peers=sends_to_peers)
    handovers = Handovers(options, SaveRules(BLOCK, CHUNK, save_decode=False, save_tails=False), StepTracker())
    handovers.connect(
        1, lambda name, port: any(name == at and port in {None, its} for at, its in now), takes_parts=False
    )
    assert handovers._is_allowed(host) is is_sent
    assert handovers._is_allowed_source(Source(host, 7300, 1)) is is_sent
    assert not handovers._is_allowed_source(Source(host, 7301, 1))
    now.clear()
    assert not handovers._is_allowed(host)
    assert not handovers._is_allowed_source(Source(host, 7300, 1))


@pytest.mark.parametrize("allowed", [HOST, OTHER_NAME])
def test_every_host_must_be_allowed(decode: OnTwoHosts, allowed: str) -> None:
    wire = NotingWire()
    with closing(prefill(wire, allowed)) as first:
        first.ask("prefill", PROMPT, handover=to_both(decode))
        flush(first)
    assert not wire.urls
