"""The dashboard as Grafana's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, StackingMode, VizOrientation
from grafana_foundation_sdk.models.common import TooltipDisplayMode as Tooltip
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from kvstore.tools.dev.observe.engine_rows import FULL, HEALTHY, HELPING, REMOTE, SLOW
from kvstore.tools.dev.observe.panels import FRACTION, Panel, Row
from kvstore.tools.dev.observe.server_rows import HANDED_OVER, SERVER

ROWS: Final = (HELPING, HEALTHY, FULL, SLOW, SERVER, HANDED_OVER, REMOTE)
NOT_SHOWN: Final[dict[str, str]] = {}
"""Exported metrics that are on no panel, and the reason."""

_OURS: Final = "kvstore_server_clients|kvstore_proxy_in_flight|vllm:kvstore_lookups_total"
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_PANELS_ABREAST: Final = 3
_WIDTH: Final = 24 // _PANELS_ABREAST
_HEIGHT: Final = 8


def board() -> str:
    """Return the dashboard as a file's text."""
    made = (
        dashboard.Dashboard("kvstore")
        .uid("kvstore")
        .description("Tiered KV cache of vLLM: engines, cache servers and the proxy. Made by tools/dev/observe.")
        .tags(["kvstore", "vllm"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-3h", "now")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in _variables():
        made.with_variable(variable)
    number = 0
    for row in ROWS:
        number += 1
        made.with_row(dashboard.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            made.with_panel(_panel(panel).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def queries() -> Iterator[tuple[Row, Panel, str]]:
    """Yield all queries with their panels."""
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries.values():
                yield row, panel, query


def _variables() -> Iterator[dashboard.QueryVariable]:
    """Yield what an operator chooses by: each choice narrows the next."""
    asked = {
        "job": f'label_values({{__name__=~"{_OURS}"}}, job)',
        "instance": f'label_values({{__name__=~"{_OURS}",job=~"$job"}}, instance)',
        "model": 'label_values(vllm:kvstore_lookups_total{job=~"$job",instance=~"$instance"}, model_name)',
    }
    for name, query in asked.items():
        yield (
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(_SOURCE)
            .query(query)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(text="All", value="$__all"))
        )


def _panel(panel: Panel) -> bargauge.Panel | timeseries.Panel:
    made = _bars(panel) if panel.is_now else _course(panel)
    made.title(panel.title).description(panel.meaning).datasource(_SOURCE).unit(panel.unit).min(0)
    made.height(_HEIGHT).span(_WIDTH)
    if panel.unit == FRACTION:
        made.max(1)
    for number, (legend, query) in enumerate(panel.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number))
        made.with_target(target.instant() if panel.is_now else target.range())
    return made


def _bars(_panel: Panel) -> bargauge.Panel:
    return bargauge.Panel().orientation(VizOrientation.HORIZONTAL)


def _course(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)
    made = timeseries.Panel().legend(legend).tooltip(common.VizTooltipOptions().mode(Tooltip.MULTI))
    if panel.is_stacked:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(20)
    return made
