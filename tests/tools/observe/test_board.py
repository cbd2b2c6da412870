"""Tests of the committed dashboard and alerts: made from the code, about all metrics, and of those that exist."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml
from support import prometheus
from support.prometheus import OBSERVE, OF_OTHERS, RULES, names_in, plain, require

from kvstore.tools.dev.observe.board import NOT_SHOWN, ROWS, board, queries

DOCS = OBSERVE.parents[1]
TESTS = sorted(OBSERVE.glob("alerts_*test.yaml"))


@cache
def exported() -> frozenset[str]:
    return frozenset(prometheus.exported())


@cache
def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    listed = [rule for group in groups for rule in group["rules"]]
    found = {rule["alert"]: rule for rule in listed}
    assert len(found) == len(listed)
    return found


def test_the_dashboard_is_the_one_of_the_code() -> None:
    """To make it again: ``python -m kvstore.tools.dev.observe``."""
    assert (OBSERVE / "dashboard.json").read_text(encoding="utf-8") == board()


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for _, _, query in queries() for name in names_in(plain(query))}
    assert shown <= exported() | OF_OTHERS
    assert exported() - shown == NOT_SHOWN.keys()
    assert not NOT_SHOWN.keys() & shown


def test_panels_are_whole() -> None:
    tree = json.loads(board())
    panels = [panel for panel in tree["panels"] if panel["type"] != "row"]
    assert len(panels) == sum(len(row.panels) for row in ROWS)
    assert len({panel["id"] for panel in tree["panels"]}) == len(tree["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "no panel lies on another"
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    names = [variable["name"] for variable in tree["templating"]["list"]]
    assert names == ["datasource", "job", "instance", "model"]


def test_legends_name_labels_that_queries_keep() -> None:
    for _, panel, query in queries():
        (legend,) = (legend for legend, each in panel.queries.items() if each == query)
        kept = re.findall(r"by \(([^)]*)\)", query)
        for label in re.findall(r"{{(\w+)}}", legend):
            assert not kept or any(label in labels.replace(" ", "").split(",") for labels in kept), (panel.title, label)


class TestAlerts:
    def test_they_are_sound(self) -> None:
        subprocess.run([require("promtool"), "check", "rules", str(RULES)], check=True, capture_output=True)

    def test_each_fires_and_is_silent_else(self) -> None:
        command = [require("promtool"), "test", "rules", *map(str, TESTS)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()

    def test_each_is_tested(self) -> None:
        silent: set[str] = set()
        fires: set[str] = set()
        files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in TESTS]
        for test in (test for file in files for test in file["tests"]):
            for asked in test["promql_expr_test"]:
                assert f'alertname="{test["name"]}"' in asked["expr"]
                (fires if asked["exp_samples"] else silent).add(test["name"])
        assert silent == fires == alerts().keys()

    @pytest.mark.parametrize("name", alerts())
    def test_each_says_what_to_do(self, name: str) -> None:
        rule = alerts()[name]
        assert re.fullmatch(r"KVStore[A-Za-z]+", name)
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "runbook", "docs"}
        assert len(rule["annotations"]["runbook"]) > 20
        page, _, anchor = rule["annotations"]["docs"].partition("#")
        titles = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors

    @pytest.mark.parametrize("name", alerts())
    def test_each_is_of_metrics_that_exist(self, name: str) -> None:
        assert names_in(alerts()[name]["expr"]) <= exported() | OF_OTHERS
