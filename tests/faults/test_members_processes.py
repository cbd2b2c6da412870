"""Three ``kvstore serve`` processes behind a name server: one is killed, one is added."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import pytest
from support.cache_server import ServerProcess, short_folder
from support.members import QUICKLY, held, names_in, open_members, owned, read, store
from support.name_server import NameServer
from support.redis_server import wait_for

from kvstore.model.chunks import Outcome
from kvstore.testing.harness import make_ref
from kvstore.tiers.members import tier as members_tier
from kvstore.tiers.server.operator import Operator
from kvstore.tiers.server.url import parse_server
from kvstore.tools.processes import free_port

pytestmark = pytest.mark.sweep

REFS = [make_ref(number) for number in range(90)]
SERVICE = "_kvs._tcp.cache"
ROUNDS = 20


def stats(server: ServerProcess) -> dict[str, Any]:
    with closing(Operator(parse_server(server.url, {"timeout_s": 10.0}))) as operator:
        return operator.stats()


def test_a_killed_and_an_added_server_cost_their_shares_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hit rate falls by a share and returns. Nobody is asked more than once for a lookup, from few connections."""
    monkeypatch.setattr(members_tier, "_INTERVAL_S", QUICKLY)
    with ExitStack() as running:
        names = running.enter_context(NameServer({}))
        servers: dict[str, ServerProcess] = {}

        def start(number: int) -> str:
            server = ServerProcess(running.enter_context(short_folder()), port=free_port())
            running.callback(server.kill)
            name = f"kvs-{number}.cache:{server.tcp_url.rpartition(':')[2]}"
            names.records[name.partition(":")[0]] = ["127.0.0.1"]
            servers[name] = server.start()
            return name

        def point_to(*members: str) -> None:
            targets = [(name.partition(":")[0], int(name.partition(":")[2])) for name in members]
            names.records[SERVICE] = targets

        old = [start(number) for number in range(3)]
        point_to(*old)
        tier = open_members(f"kvs+srv://{SERVICE}?nameserver=127.0.0.1:{names.port}")
        running.callback(tier.close)
        assert names_in(tier) == sorted(old)
        assert set(store(tier, REFS)) == {Outcome.STORED}
        for _ in range(ROUNDS):
            assert held(tier, REFS) == set(REFS)
        for server in servers.values():
            told = stats(server)
            assert told["namespaces"][0]["counters"]["lookups"] <= ROUNDS
            assert told["clients"] <= 3, "of this tier, and of this question"
        assert read(tier, REFS) == set(REFS)

        killed, shares = old[0], owned(old, REFS)
        servers[killed].kill()
        read(tier, REFS)  # finds out
        assert read(tier, REFS) == held(tier, REFS) == set(REFS) - shares[killed]

        added = start(3)
        now = [*old[1:], added]
        point_to(*now)
        wait_for("the members are known", lambda: names_in(tier) == sorted(now))
        moved = owned(now, REFS)[added]
        left = set(REFS) - shares[killed] - moved
        assert read(tier, REFS) == held(tier, REFS) == left
        assert set(store(tier, sorted(set(REFS) - left))) == {Outcome.STORED}
        assert read(tier, REFS) == held(tier, REFS) == set(REFS)
        assert all(stats(servers[name])["clients"] <= 3 for name in now)
