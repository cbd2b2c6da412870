"""Command ``kvstore simulate``, which replays recorded traces through eviction policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools.console import AsJson
from kvstore.tools.simulate.options import Simulation


def simulate(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces that kvstore recorded, or in Mooncake's format.", exists=True)
    ],
    *,
    given: Simulation,
    fleet: Annotated[
        Path | None,
        typer.Option(help="YAML file of replicas, router and tiers: also shows TTFT and cost.", exists=True),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this .svg, .png or .pdf file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traces through the eviction policies: what would another 100 GB bring?

    For a trace of Mooncake, whose ids stand for 512 tokens: --block-tokens 512 --chunk-tokens 4096.

    With --fleet fleet.yaml: what would ten replicas, another router, a shared tier bring? See docs/scale.md.

    Sizes are in chunks unless --bytes-per-token is given. Exits with 2 if a trace cannot be read.
    """
    if fleet is not None:
        from kvstore.tools.simulate.fleetrun import simulate_fleets_and_print  # noqa: PLC0415

        simulate_fleets_and_print(traces, fleet, given, plot_file=plot, as_json=as_json)
        return
    from kvstore.tools.simulate.run import SimulateOptions, simulate_and_print  # noqa: PLC0415

    simulate_and_print(traces, SimulateOptions(given), plot_file=plot, as_json=as_json)
