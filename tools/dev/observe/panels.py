"""Panels and rows of the dashboard, and the queries that they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WINDOW: Final = "$__rate_interval"  # Grafana's: at least four scrapes
_TARGET: Final = 'job=~"$job",instance=~"$instance"'
SECONDS, BYTES, BYTES_PER_S, PER_S, FRACTION, NUMBER = "s", "bytes", "Bps", "cps", "percentunit", "short"
"""Units, as Grafana calls them."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: the question that it answers, or the quantity that it shows.
        meaning: sentences for an operator: what is normal, and what to do otherwise.
        unit: a unit of Grafana's.
        queries: queries by the legend of their series.
        is_stacked: True for parts of a whole.
        is_now: True to show the latest value as a number, instead of its course.
    """

    title: str
    meaning: str
    unit: str
    queries: dict[str, str]
    is_stacked: bool = False
    is_now: bool = False


@dataclass(frozen=True)
class Row:
    """A group of panels, whose title is a question of an operator."""

    title: str
    panels: tuple[Panel, ...]


def engine(name: str, *conditions: str) -> str:
    """Return a selector of an engine's metric, which has vLLM's labels."""
    return _selector(f"vllm:kvstore_{name}", 'model_name=~"$model"', *conditions)


def vllm(name: str) -> str:
    """Return a selector of a metric of vLLM's own."""
    return _selector(f"vllm:{name}", 'model_name=~"$model"')


def server(name: str, *conditions: str) -> str:
    """Return a selector of a cache server's metric."""
    return _selector(f"kvstore_server_{name}", *conditions)


def proxy(name: str) -> str:
    """Return a selector of a proxy's metric."""
    return _selector(f"kvstore_proxy_{name}")


def _selector(name: str, *conditions: str) -> str:
    return f"{name}{{{','.join((_TARGET, *conditions))}}}"


def rate(selector: str, by: str = "") -> str:
    """Return a query for the growth of a counter in each second."""
    return total(f"rate({selector}[{WINDOW}])", by)


def grown(selector: str, by: str = "") -> str:
    """Return a query for the growth of a counter within the window, for events that are rare."""
    return total(f"increase({selector}[{WINDOW}])", by)


def total(query: str, by: str = "") -> str:
    """Return a query for the sum."""
    return f"sum by ({by}) ({query})" if by else f"sum({query})"


def worst(query: str, by: str) -> str:
    """Return a query for the maximum."""
    return f"max by ({by}) ({query})"


def quantile(fraction: float, histogram: str, by: str = "") -> str:
    """Return a query for a quantile of a histogram, which is given as the selector of its buckets."""
    return f"histogram_quantile({fraction}, {rate(histogram, f'le, {by}' if by else 'le')})"
