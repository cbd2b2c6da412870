"""Lists and tables that pages have from the code: ``python -m support.doc_tables`` in ``tests`` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstore.config.reference import KEYS
from kvstore.ops.metrics import METRICS, MetricKind
from kvstore.tools.calc import calculate, kept
from kvstore.tools.console import size
from kvstore.tools.modelconfig import parse_model
from support.hybrid_configs import HYBRIDS

TOPICS: Final = {
    "Memory": (
        "max_local_cpu_size local_cpu chunk_size checkpoint_interval cache_policy max_local_gpu_size pin_in_background "
        "local_cpu_quotas quota_by record_trace"
    ),
    "Disk": (
        "local_disk max_local_disk_size local_disk_serde encryption_keys disk_cache_policy max_write_queue "
        "disk_io_threads use_odirect local_disk_quotas"
    ),
    "Shared": (
        "remote_url remote_host_url remote_username remote_password remote_key_file remote_server_key_file "
        "remote_required remote_ttl_secs remote_serde remote_connections remote_io_threads remote_lookup_cache_secs "
        "max_remote_queue lookup_timeout_ms peers reshard_from min_remote_tokens"
    ),
    "Loading": (
        "enable_async_loading enable_async_saving use_layerwise load_only_if_faster min_retrieve_tokens "
        "max_tokens_per_load blocking_timeout_secs verify_fraction"
    ),
    "Requests": (
        "save_decode_cache save_unfull_chunk discard_partial_chunks skip_last_n_tokens priority_limit force_skip_save "
        "request_fields retain_max_secs retain_share pin_max_secs"
    ),
    "Prefill and decode": (
        "enable_pd pd_role pd_bidirectional pd_buffer_size pd_peer_host pd_peer_init_port pd_allowed_hosts "
        "pd_timeout_ms transfer_channel"
    ),
    "Server": (
        "server_listen server_key_file server_clients server_operators server_quotas server_http_port server_http_host "
        "server_http_token_file server_drain_secs server_log_level"
    ),
    "Operation": (
        "required allow_untested_vllm internal_api_server_enabled internal_api_server_host "
        "internal_api_server_port_start internal_api_server_token_file log_request_sample model_id"
    ),
}
"""The keys by what a user has in mind, most wanted first."""
_UNITS: Final = {"GiB per worker": "GiB", "bytes per worker": "bytes", "seconds": "s", "milliseconds": "ms"}


def key_list() -> str:
    """Return all keys as Markdown, by topic: name, default, meaning."""
    listed = " ".join(TOPICS.values()).split()
    assert sorted(listed) == sorted(KEYS), f"of one topic each: {set(listed) ^ set(KEYS)}"
    parts = [f"### {topic}\n\n" + "\n".join(map(_key_item, keys.split())) for topic, keys in TOPICS.items()]
    return "\n\n".join(parts)


def _key_item(name: str) -> str:
    key = KEYS[name]
    value = json.loads(key.default)
    words = ", ".join(value) if isinstance(value, list) else key.default.strip('"')
    default = words if value in (None, []) else f"{words} {_UNITS.get(key.unit, key.unit)}".strip()
    return f"- `{name}` ({default or 'none'}): {key.meaning}"


def metric_list(prefix: str) -> str:
    """Return all metrics as Markdown, by kind: name with a prefix, labels, meaning."""
    parts = []
    for kind in MetricKind:
        items = [
            f"- `{prefix}{metric.name}{_in_braces(metric.labels)}`: {metric.meaning}."
            for metric in METRICS.values()
            if metric.kind is kind
        ]
        parts.append(f"{kind.value.capitalize()}s:\n\n" + "\n".join(items))
    return "\n\n".join(parts)


def _in_braces(labels: Sequence[str]) -> str:
    return f"{{{', '.join(labels)}}}" if labels else ""


def hybrid_table() -> str:
    """Return the results of ``kvstore calc`` for public models with windows or states, as a Markdown table."""
    titles = (
        "model",
        "other layers keep",
        "chunk",
        "checkpoint",
        "a prompt stores",
    )
    rows = []
    for name, config in HYBRIDS.items():
        sizes = calculate(parse_model(config))
        checkpoint, prompt, (_, other) = sizes.checkpoint, sizes.prompt, sizes.groups
        assert checkpoint is not None
        cells = (
            name,
            f"{kept(other)} ({other.layers})",
            f"{sizes.chunk_tokens} tokens, {size(sizes.chunk_bytes)}",
            size(checkpoint.size_bytes),
            f"{prompt.chunks} + {prompt.checkpoints}: {size(prompt.stored_bytes)}",
        )
        rows.append(cells)
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *rows))
    return "\n".join((first, f"|{'---|' * len(titles)}", *others))


DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
GENERATED: Final[dict[tuple[str, str], Callable[[], str]]] = {
    ("configuration.md", "keys"): key_list,
    ("operations.md", "metrics"): lambda: metric_list("vllm:kvstore_"),
    ("sizing.md", "hybrids"): hybrid_table,
}
"""By page and the comments between which it stands."""


def section(page: str, name: str) -> str:
    """Return the text of a page between two comments."""
    match = re.search(_between(name), (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None, f"{page} has no {name}"
    return match[2]


def _between(name: str) -> str:
    return rf"(<!-- {name} -->\n\n?)(.*?)(\n\n?<!-- /{name} -->)"


def write(page: str, name: str, content: str) -> None:
    """Put the content between the two comments."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (DOCS / page).write_text(re.sub(_between(name), lambda m: m[1] + content + m[3], text, flags=re.DOTALL))


if __name__ == "__main__":
    for (page, name), make in GENERATED.items():
        write(page, name, make())
