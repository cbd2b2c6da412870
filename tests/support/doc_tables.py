"""The tables that the documentation has from the code."""

from __future__ import annotations

from kvstore.config.lmcache import FAMILIES
from kvstore.config.reference import KEYS
from kvstore.ops.metrics import METRICS
from kvstore.tools.calc import calculate, kept
from kvstore.tools.console import size
from kvstore.tools.modelconfig import parse_model
from support.hybrid_configs import HYBRIDS


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


def hybrid_table() -> str:
    """What ``kvstore calc`` says of public models with windows or states, as a Markdown table."""
    titles = (
        "model",
        "layers that keep all",
        "other layers keep",
        "chunk",
        "checkpoint",
        "worth",
        "a prompt stores",
        "without the hybrid manager",
    )
    rows = []
    for name, config in HYBRIDS.items():
        sizes = calculate(parse_model(config))
        checkpoint, prompt, (full, other) = sizes.checkpoint, sizes.prompt, sizes.groups
        assert checkpoint is not None
        cells = (
            name,
            str(full.layers),
            f"{kept(other)} ({other.layers})",
            f"{sizes.chunk_tokens} tokens, {size(sizes.chunk_bytes)}",
            size(checkpoint.size_bytes),
            f"{checkpoint.worth_tokens:,} tokens",
            f"{prompt.chunks} + {prompt.checkpoints}: {size(prompt.stored_bytes)}",
            size(prompt.promoted_bytes) if prompt.promoted_bytes else "does not start",
        )
        rows.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ("---",) * len(titles), *rows))
