"""The tables that the documentation has from the code."""

from __future__ import annotations

from kvstore.config.lmcache import FAMILIES
from kvstore.config.reference import KEYS
from kvstore.ops.metrics import METRICS


def key_table() -> str:
    """All keys as a Markdown table."""
    rows = [f"| `{k.key}` | {k.kind} | {k.default} | {k.unit} | {k.meaning} |" for k in KEYS.values()]
    return "\n".join(["| key | type | default | unit | meaning |", "| --- | --- | --- | --- | --- |", *rows])


def lmcache_table() -> str:
    """LMCache's keys that have no effect here, as a Markdown table."""
    rows = [f"| {', '.join(f'`{key}`' for key in keys.split())} | {meaning} |" for keys, meaning in FAMILIES.items()]
    return "\n".join(["| keys of LMCache | what their absence means |", "| --- | --- |", *rows])


def metric_table(prefix: str) -> str:
    """All metrics as a Markdown table, their names with a prefix."""
    rows = [
        f"| `{prefix}{metric.name}` | {metric.kind.value} | {', '.join(f'`{label}`' for label in metric.labels)} "
        f"| {metric.meaning}. |"
        for metric in METRICS.values()
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows])
