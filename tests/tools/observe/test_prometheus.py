"""Tests of the dashboard and the alerts with a real Prometheus, a real cache server, and clients that load it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from support.cache_server import ServerProcess, short_folder
from support.forked import forker
from support.prometheus import PrometheusServer, names_in, plain
from support.redis_server import wait_for
from support.served import open_tier

from kvstore.model.errors import TierError
from kvstore.protocol.keyfiles import make_keys
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tools.dev.observe.board import queries
from kvstore.tools.dev.observe.server_rows import SERVER
from kvstore.tools.processes import free_port

pytestmark = pytest.mark.sweep

LISTED = {"engine": "", "reader": "rights: read\n"}
LINES = """
server_http_port: {http}
server_key_file: {folder}/keys/server.key
server_clients: {folder}/clients
server_quotas: "*=0.2"
local_disk: {folder}/disk
max_local_disk_size: 0.5
"""
QUERIES = [(panel.title, query) for row, panel, query in queries() if row is SERVER]
LATER = {"kvstore_server_denied_total": "no client lacks anything at first"}


@dataclass
class Plant:
    """A cache server with clients under load, and the Prometheus that watches it."""

    server: ServerProcess
    prometheus: PrometheusServer

    def connect(self, key: str) -> None:
        """Store a chunk over the network with a client's key, as far as the server lets it."""
        keys = self.server.folder
        options: dict[str, Any] = {"client_key_file": str(keys / f"{key}.key"), "timeout_s": 0.3}
        try:
            tier = open_tier(self.server.tcp_url, server_key_file=str(keys / "keys/server.pub"), **options)
        except TierError:
            return
        try:
            tier.put([make_transfer(EVEN, make_ref(1))])
        except TierError:
            pass
        finally:
            tier.close()


@pytest.fixture(scope="module")
def plant() -> Iterator[Plant]:
    with short_folder() as folder:
        make_keys(folder / "keys", "server")
        make_keys(folder, "stranger")
        for name, rights in LISTED.items():
            make_keys(folder / "clients", name)
            with (folder / "clients" / f"{name}.pub").open("a") as file:
                file.write(rights)
        http = free_port()
        server = ServerProcess(folder, LINES.format(http=http, folder=folder), free_port())
        prometheus = PrometheusServer(folder / "prometheus", {"cache": [http]})
        load = None
        try:
            server.start()
            load = forker().start(["support.server_client", server.url, 600, 2, 1])
            with prometheus.serving():
                yield Plant(server, prometheus)
        finally:
            if load is not None:
                load.kill()
                load.wait()
            server.kill()


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title} {n}" for n, (title, _) in enumerate(QUERIES)])
def test_every_panel_of_the_server_has_data(plant: Plant, title: str, query: str) -> None:
    names = names_in(plain(query))
    if names & LATER.keys():
        pytest.skip(LATER[names.pop()])
    wait_for(f"{title}: {query}", lambda: plant.prometheus.query(plain(query)))


def test_all_alerts_are_silent(plant: Plant) -> None:
    wait_for("an hour's rates of a busy server", lambda: plant.prometheus.query("kvstore_server_read_chunks_total > 0"))
    assert plant.prometheus.alerts() == set()
    assert plant.prometheus.problems_of_rules() == []


def test_a_client_without_a_listed_key(plant: Plant) -> None:
    fires_after(plant, "KVStoreClientsRefused", lambda: plant.connect("stranger"))


def test_a_client_without_a_right(plant: Plant) -> None:
    alert = fires_after(plant, "KVStoreClientDenied", lambda: plant.connect("clients/reader"))
    assert alert["annotations"]["summary"].endswith(": reader lacks write")
    for _, query in QUERIES:
        if names_in(plain(query)) & LATER.keys():
            assert plant.prometheus.query(plain(query))


def test_a_disk_that_fails(plant: Plant) -> None:
    disk = plant.server.folder / "disk"

    def replace_with_a_file() -> None:
        shutil.rmtree(disk, ignore_errors=True)
        with suppress(IsADirectoryError):  # the server makes folders in it all the time
            disk.write_bytes(b"")  # root may write anywhere, but not below a file

    fires_after(plant, "KVStoreDiskErrors", replace_with_a_file)


def test_a_reload_that_is_refused(plant: Plant) -> None:
    assert plant.server.process is not None
    plant.server.config.write_text(plant.server.config.read_text() + "server_quotas: what\n")
    plant.server.process.send_signal(signal.SIGHUP)
    fires_after(plant, "KVStoreReloadRefused", lambda: None)


def test_a_server_that_is_killed(plant: Plant) -> None:
    plant.server.kill()
    assert plant.prometheus.alert("KVStoreServerDown")["labels"]["job"] == "cache"


def fires_after(plant: Plant, name: str, trouble: Callable[[], object]) -> dict[str, Any]:
    """Return the alert, which fires because of a trouble that goes on."""

    def fires() -> bool:
        trouble()
        return name in plant.prometheus.alerts()

    assert name not in plant.prometheus.alerts()
    wait_for(f"{name} is pending", fires)
    return plant.prometheus.alert(name)
