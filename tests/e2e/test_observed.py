"""Test of the dashboard and the alerts on real vLLMs with a proxy and a cache server, watched by a real Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.cache_server import ServerProcess, short_folder
from support.disaggregated import PATIENT, Disaggregation
from support.prometheus import OF_OTHERS, PrometheusServer, names_in, plain
from support.redis_server import wait_for

from kvstore.tools.dev.observe.board import queries
from kvstore.tools.models import TINY, random_tokens
from kvstore.tools.processes import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.sweep]

OUTPUT_TOKENS = 4
WAIT_S = 120.0  # for Prometheus, beside two busy engines
SERVER = """
server_http_port: {http}
server_quotas: "*=0.2"
local_disk: {folder}/disk
max_local_disk_size: 0.5
"""
ENGINE = f"""
enable_pd: true
pd_buffer_size: {64 << 20}
max_local_cpu_size: 0.02
local_cpu_quotas: '*=0.02'
local_disk_quotas: '*=0.1'
local_disk: {{folder}}
max_local_disk_size: 0.5
remote_url: {{url}}
load_only_if_faster: false
verify_fraction: 0.5
request_fields: retain,demote
internal_api_server_enabled: true
internal_api_server_port_start: {{admin}}
{PATIENT}"""
CANNOT_OCCUR = {
    "kvstore_server_denied_total": "no client lacks a right",
    "vllm:prefix_cache_hits_total": "it is switched off, so that kvstore is asked",
    "vllm:kvstore_verify_deviation": "KV that is computed twice on one machine does not differ",
    "kvstore_proxy_errors_total": "no request fails, and a reason has no series before",
    "kvstore_proxy_fallbacks_total": "no request takes another way, and a reason has no series before",
}
"""Metrics without a value in this run, and the reason."""


class Site:
    """Two engines with a proxy, the cache server that they share, and the Prometheus that watches all of them."""

    def __init__(
        self, engines: Disaggregation, server: ServerProcess, admin: int, prometheus: PrometheusServer
    ) -> None:
        self.engines, self.server, self.admin, self.prometheus = engines, server, admin, prometheus
        self._number = 0

    def work(self, *, again: bool = True) -> None:
        """Have one of a few prompts, or a new one, computed and loaded: through the proxy, and beside it."""
        self._number += 1
        turn = random_tokens(600, vocab=TINY.vocab, seed=self._number % 12 if again else self._number + 1000)
        body = {"model": self.engines.model, "prompt": turn, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        fields = {"kvstore.retain": 60}
        with httpx.Client(trust_env=False, timeout=120) as client:
            for url in (self.engines.proxy.url, self.engines.prefill.url, self.engines.decode.url):
                asked = body if url == self.engines.proxy.url else {**body, "kv_transfer_params": fields}
                client.post(f"{url}/v1/completions", json=asked).raise_for_status()


@pytest.fixture(scope="module")
def site(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("observed")
    http, handed, admins = free_port(), free_port(), [free_port(), free_port()]
    uncached = ("--no-enable-prefix-caching",)
    with short_folder() as run:
        server = ServerProcess(run, SERVER.format(http=http, folder=run))
        try:
            server.start()
            lines = [
                ENGINE.format(folder=folder / name, url=server.url, admin=admin)
                for name, admin in zip(("prefill", "decode"), admins, strict=True)
            ]
            lines[1] += f"pd_peer_init_port: {handed}\n"
            options = ("--decode-kv", f"kvs://127.0.0.1:{handed}", "--first-token", "--health-interval-s", "0.5")
            engines = Disaggregation(
                tiny_model, folder, prefill=lines[0], decode=lines[1], options=options, arguments=uncached
            )
            jobs = {
                "vllm": [engines.prefill.port, engines.decode.port],
                "cache": [http],
                "proxy": [engines.proxy.port],
            }
            prometheus = PrometheusServer(folder / "prometheus", jobs)
            with engines, prometheus.serving():
                yield Site(engines, server, admins[0], prometheus)
        finally:
            server.kill()


def test_every_panel_has_data(site: Site) -> None:
    asked = [(panel.title, plain(query)) for _, panel, query in queries()]
    missing = [each for each in asked if not names_in(each[1]) & CANNOT_OCCUR.keys()]
    assert len(missing) > len(asked) * 0.8

    def is_complete() -> bool:
        site.work()
        missing[:] = [each for each in missing if not has_data(site.prometheus, each[1])]
        return not missing

    try:
        wait_for("every panel has data", is_complete, WAIT_S)
    finally:
        assert not missing, "\n".join(map(str, missing))
    for name in OF_OTHERS:
        assert site.prometheus.query(name), f"{name} is no metric of this vLLM"
    assert site.prometheus.problems_of_rules() == []
    assert site.prometheus.alerts() == set()


def has_data(prometheus: PrometheusServer, query: str) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(query))


def test_a_cache_that_is_switched_off(site: Site) -> None:
    url = f"http://127.0.0.1:{site.admin}"
    httpx.post(f"{url}/disable", trust_env=False).raise_for_status()
    assert fires(site, "KVStoreSwitchedOff")
    httpx.post(f"{url}/enable", trust_env=False).raise_for_status()


def test_a_disk_that_fails(site: Site) -> None:
    (folder,) = (Path(line.split()[1]) for line in config_of(site).splitlines() if line.startswith("local_disk:"))
    folder.rename(folder.with_name("gone"))
    folder.write_bytes(b"")  # root may write anywhere, but not below a file
    for name in ("KVStoreWritesFail", "KVStoreTierLeftOut"):
        assert fires(site, name)["labels"]["tier"] == "disk"


def test_an_engine_that_is_killed(site: Site) -> None:
    site.engines.decode.kill()
    alert = site.prometheus.alert("KVStoreProxyEngineDown")
    assert alert["labels"]["engine"] == site.engines.decode.url


def config_of(site: Site) -> str:
    return site.engines.prefill.config.read_text(encoding="utf-8")


def fires(site: Site, name: str) -> dict[str, dict[str, str]]:
    """Return an alert, which fires while vLLM works: it exports its metrics with its steps."""

    def is_firing() -> bool:
        site.work(again=False)
        return name in site.prometheus.alerts()

    wait_for(f"{name} is pending", is_firing, WAIT_S)
    return site.prometheus.alert(name)
