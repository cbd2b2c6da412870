"""Real Prometheus servers for tests, and the names of all metrics that we export."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvstore.ops.metrics import METRICS, MetricKind
from kvstore.server.exposition import Exposition
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tools.processes import free_port, running
from kvstore.tools.proxy.meters import ProxyMeters
from support.cache_server import serving_ipc
from support.redis_server import wait_for
from support.served import open_tier

OBSERVE: Final = Path(__file__).resolve().parents[2] / "deploy" / "observe"
RULES: Final = OBSERVE / "alerts.yaml"
OF_OTHERS: Final = frozenset(
    {
        "up",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    }
)
"""Metrics in our queries that vLLM or Prometheus exports; ``tests/e2e/test_observed.py`` sees that they exist."""
WINDOW: Final = "6s"
_SCRAPE: Final = "500ms"
_SUFFIXES: Final = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_bucket"}
_EVERYTHING: Final = {"$job": ".*", "$instance": ".*", "$model": ".*", "$__rate_interval": WINDOW}


def require(program: str) -> str:
    """Return the path of a program. Without it tests are skipped, but fail where CI is set."""
    path = shutil.which(program)
    if path is None:
        reason = f"{program} is not installed: apt-get install prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def exported() -> set[str]:
    """Return the names of all metrics of engines, cache servers and proxies, as queries use them."""
    names = {f"vllm:kvstore_{metric.name}{_SUFFIXES[metric.kind]}" for metric in METRICS.values()}
    with serving_ipc(quotas={"*": 1 << 30}) as server:
        tier = open_tier(server.url)
        tier.put([make_transfer(EVEN, make_ref(1))])
        names |= _names_in(Exposition().page(server.hub.snapshot(5.0), {"ok": 0}))
        tier.close()
    return names | _names_in(ProxyMeters().exposition([], is_outdated=False).decode())


def _names_in(page: str) -> set[str]:
    suffixes = {"counter": "_total", "histogram": "_bucket"}
    families = [each for each in text_string_to_metric_families(page) if not each.name.endswith("_created")]
    return {each.name + suffixes.get(each.type, "") for each in families}


def names_in(query: str) -> set[str]:
    """Return the metrics that a query reads."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector) and node.name:
            found.add(node.name)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def plain(query: str) -> str:
    """Return a panel's query with a value for each variable of the dashboard."""
    for name, value in _EVERYTHING.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


@dataclass
class PrometheusServer:
    """A process that scrapes targets often.

    Attributes:
        folder: folder for its configuration, data and log.
        targets: ports of pages, by job.
        rules: file of alert rules; their ``for`` is left out, and nothing else is changed.
    """

    folder: Path
    targets: Mapping[str, Sequence[int]]
    rules: Path = RULES
    port: int = field(default_factory=free_port)

    @contextmanager
    def serving(self) -> Iterator[PrometheusServer]:
        """Run until the end of the block."""
        program = require("prometheus")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "rules.yaml").write_text(yaml.safe_dump(_without_for(self.rules)))
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(self._config()))
        command = [program, f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"]
        log = self.folder / "log"
        with log.open("wb") as output, running(command, stdout=output, stderr=subprocess.STDOUT) as process:
            wait_for("Prometheus is ready", lambda: process.poll() is not None or self._is_ready())
            assert process.poll() is None, log.read_text()
            yield self

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series of a query at present."""
        return list(self._get("query", query=query)["result"])

    def alerts(self) -> set[str]:
        """Return the names of the alerts that are pending or firing."""
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"]}

    def alert(self, name: str) -> dict[str, Any]:
        """Wait until an alert fires, and return it."""

        def firing() -> list[dict[str, Any]]:
            alerts: list[dict[str, Any]] = self._get("alerts")["alerts"]
            return [each for each in alerts if each["labels"]["alertname"] == name and each["state"] == "firing"]

        wait_for(f"{name} fires", firing)
        return firing()[0]

    def problems_of_rules(self) -> list[str]:
        """Return the errors of rules that could not be evaluated."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        assert rules
        return [f"{rule['name']}: {rule['lastError']}" for rule in rules if rule.get("lastError")]

    def _config(self) -> dict[str, Any]:
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in self.targets.items()
        ]
        every = {"scrape_interval": _SCRAPE, "scrape_timeout": _SCRAPE, "evaluation_interval": _SCRAPE}
        return {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": jobs}

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/-/ready", trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        answer = httpx.get(f"http://127.0.0.1:{self.port}/api/v1/{what}", params=parameters, trust_env=False)
        assert answer.is_success, answer.text
        tree: dict[str, Any] = answer.json()["data"]
        return tree


def _without_for(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in tree["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return tree
