"""Tests of a cache server shared by several models: namespaces, quotas, pages and metrics."""

from __future__ import annotations

import random
import re
import socket
import time
from pathlib import Path

from support.cache_server import ServerProcess, ServerThread, serving_ipc, serving_tcp
from support.redis_server import wait_for
from support.served import BIG, A, check_quiet, check_read, open_tier, scan, used_bytes

from kvstore.model.chunks import Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol.payload import PAGE_BYTES
from kvstore.server.disk_tiers import DiskOptions
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tools.processes import free_port


class TestManyNamespaces:
    def test_models_of_different_sizes_share_the_pool(self, server: ServerThread) -> None:
        """Before and after the pool is full, every hit is right, and every page is accounted for."""
        layouts = [EVEN, BIG, KVLayout(page_bytes=(300_000, 50), planes=2, block_tokens=16, chunk_tokens=32)]
        names = [Namespace({"model": f"model {number}"}) for number in range(3)]
        tiers = [open_tier(server.url, layout, name) for layout, name in zip(layouts, names, strict=True)]
        dice = random.Random(1)
        hits = 0
        for _ in range(300):
            which = dice.randrange(3)
            ref = make_ref(dice.randrange(30), layouts[which].blocks_per_chunk)
            if dice.random() < 0.5:
                assert tiers[which].put([make_transfer(layouts[which], ref)])[0] in {Outcome.STORED, Outcome.FULL}
            else:
                hits += check_read(tiers[which], ref, layouts[which]) is Outcome.HIT
        assert hits
        for tier in tiers:
            tier.close()
        check_quiet(server)

    def test_a_quota_is_kept(self) -> None:
        """A namespace at its quota evicts its own chunks, the least recently used first."""
        page = PAGE_BYTES
        with serving_tcp(quotas={"conformance": 8 * page, "*": 2 * page}) as server:
            tier = open_tier(server.url)
            other = open_tier(server.url, namespace=Namespace({"model": "other"}))
            for number in range(20):
                assert tier.put([make_transfer(EVEN, make_ref(number))]) == [Outcome.STORED]
                assert other.put([make_transfer(EVEN, make_ref(number))]) == [Outcome.STORED]
            assert tier._connections.use(scan) == [make_ref(number) for number in range(12, 20)]
            assert other._connections.use(scan) == [make_ref(18), make_ref(19)]
            assert tier._connections.use(used_bytes) == 8 * page
            tier.close()
            other.close()

    def test_a_fragmented_pool(self, tmp_path: Path) -> None:
        """A large chunk is stored in several runs of pages, and written to disk and read back from there."""
        disk = DiskOptions(tmp_path / "disk", 64 << 20)
        with serving_ipc(pool_bytes=8 << 20, disk=disk) as server:
            small, large = open_tier(server.url), open_tier(server.url, BIG, Namespace({"model": "big"}))
            refs = [make_ref(number) for number in range(500)]
            small.put([make_transfer(EVEN, ref) for ref in refs])
            wait_for("all is on disk", lambda: server.hub.service.writes.num_unwritten == 0)
            small.remove(refs[::2])
            ref = make_ref(1)
            assert large.put([make_transfer(BIG, ref)]) == [Outcome.STORED]
            (space,) = (s for s in server.hub.stock.spaces.values() if s.layout == BIG)
            assert len(space.chunks[ref].runs) > 1
            assert check_read(large, ref, BIG) is Outcome.HIT
            wait_for("all is on disk", lambda: server.hub.service.writes.num_unwritten == 0)
            for number in range(600):  # until only the disk has it
                small.put([make_transfer(EVEN, make_ref(1000 + number))])
            assert check_read(large, ref, BIG) is Outcome.HIT
            small.close()
            large.close()
            check_quiet(server)


def test_metrics_and_health(process: ServerProcess) -> None:
    import httpx

    process.terminate()
    port = free_port()
    process.config.write_text(process.config.read_text() + f"server_http_port: {port}\n")
    process.start()
    tier = open_tier(process.url)
    tier.put([make_transfer(EVEN, A)])

    def page(path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers)

    wait_for("the page is there", lambda: page("/healthz").text == "ok\n" if page_is_up(port) else False)
    text = page("/metrics").text
    name = r'^kvstore_server_stored_chunks_total\{namespace="[0-9a-f]{16}",model="conformance"\} 1$'
    assert re.search(name, text, re.MULTILINE)
    assert page("/metrics", host="evil.example").status_code == 403
    assert page("/other").status_code == 404
    tier.close()


def page_is_up(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_time_stands_for_nothing(server: ServerThread) -> None:
    """A lookup is answered while another client keeps the server busy with its payload."""
    tier = open_tier(server.url, BIG)
    other = open_tier(server.url)
    other.put([make_transfer(EVEN, A)])
    transfers = [make_transfer(BIG, make_ref(number)) for number in range(8)]
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 1.0:
        assert set(tier.put(transfers)) == {Outcome.STORED}
        assert other.contains([A]) == [True]
    tier.close()
    other.close()
