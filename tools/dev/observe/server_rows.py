"""Rows about cache servers, and about hand-overs with their proxy."""

from __future__ import annotations

from typing import Final

from kvstore.tools.dev.observe.panels import (
    BYTES,
    BYTES_PER_S,
    FRACTION,
    NUMBER,
    PER_S,
    SECONDS,
    Panel,
    Row,
    engine,
    grown,
    proxy,
    quantile,
    rate,
    server,
    total,
    worst,
)

_HITS = rate(server("found_chunks_total"), "instance")
_MISSING = server("missing_chunks_total")
_LARGEST = 10

SERVER: Final = Row(
    "Cache server",
    (
        Panel(
            "Ready",
            "Ready: 0 while it starts or ends. Draining: 1 once it takes nothing more. One that is gone has no value.",
            NUMBER,
            {"{{instance}} ready": server("ready"), "{{instance}} draining": server("draining")},
            is_now=True,
        ),
        Panel(
            "Clients and leases",
            "Connections, and the chunks that they read or write at present.",
            NUMBER,
            {"clients": total(server("clients")), "leases": total(server("leases"))},
        ),
        Panel(
            "Hit rate",
            "Chunks found, of those looked up.",
            FRACTION,
            {"{{instance}}": f"{_HITS} / ({_HITS} + {rate(_MISSING, 'instance')})"},
        ),
        Panel(
            "Tiers",
            "Full tiers are normal. Their evictions are below.",
            FRACTION,
            {
                "{{instance}} {{tier}}": f"{total(server('tier_used_bytes'), 'instance, tier')} / "
                f"{total(server('tier_capacity_bytes'), 'instance, tier')}"
            },
        ),
        Panel(
            "Chunks in tiers",
            "Memory and disk may have the same chunk.",
            NUMBER,
            {"{{tier}}": total(server("tier_chunks"), "tier")},
        ),
        Panel(
            "Held by clients",
            "Leased and pinned bytes, which cannot be evicted.",
            BYTES,
            {"leased": total(server("leased_bytes")), "pinned": total(server("pinned_bytes"))},
        ),
        Panel(
            "Bytes stored and read",
            "By clients.",
            BYTES_PER_S,
            {"stored": rate(server("stored_bytes_total")), "read": rate(server("read_bytes_total"))},
        ),
        Panel(
            "Chunks",
            "Lookups are requests. Loaded chunks came from disk.",
            PER_S,
            {
                "lookups": rate(server("lookups_total")),
                "stored": rate(server("stored_chunks_total")),
                "read": rate(server("read_chunks_total")),
                "loaded": rate(server("loaded_chunks_total")),
                "evicted": rate(server("evicted_chunks_total")),
                "expired": rate(server("expired_chunks_total")),
            },
        ),
        Panel(
            "Failures",
            "Full: no room for a store. Disk errors: look at the server's log, and at the disk.",
            PER_S,
            {
                "full": rate(server("full_total")),
                "failed": rate(server("failed_total")),
                "disk errors": rate(server("disk_errors_total")),
            },
        ),
        Panel(
            "Refused clients",
            "No listed key; no right or no room; a message that cannot be read. The log names the client.",
            NUMBER,
            {
                "key not listed": grown(server("refused_total")),
                "malformed message": grown(server("malformed_total")),
                "{{client}} lacks {{lacked}}": grown(server("denied_total"), "client, lacked"),
            },
        ),
        Panel(
            "Fullest quotas at servers",
            "At its quota a name of server_quotas evicts its own chunks.",
            FRACTION,
            {
                "{{tenant}} {{quota}}": f"topk(10, {total(server('quota_used_bytes'), 'tenant, quota')} / "
                f"{total(server('quota_capacity_bytes'), 'tenant, quota')})"
            },
        ),
        Panel(
            "Deciding thread",
            "One pass. All clients wait for it, so it takes milliseconds.",
            SECONDS,
            {
                "median": quantile(0.5, server("turn_seconds_bucket")),
                "p99": quantile(0.99, server("turn_seconds_bucket")),
            },
        ),
        Panel(
            "Reloads",
            "A refused one left the old settings in effect. The log says why.",
            NUMBER,
            {"{{instance}} {{outcome}}": grown(server("reloads_total"), "instance, outcome")},
        ),
        Panel(
            "Largest namespaces",
            "Bytes in memory and on disk.",
            BYTES,
            {"{{namespace}} {{model}} {{tenant}}": f"topk({_LARGEST}, {server('namespace_used_bytes')})"},
            is_now=True,
        ),
        Panel(
            "Chunks and clients of the largest namespaces",
            "A namespace without clients only waits to be evicted.",
            NUMBER,
            {
                "{{namespace}} {{tenant}} chunks": f"topk({_LARGEST}, {server('namespace_chunks')})",
                "{{namespace}} {{tenant}} clients": f"topk({_LARGEST}, {server('namespace_clients')})",
            },
            is_now=True,
        ),
    ),
)

HANDED_OVER: Final = Row(
    "Hand-overs, and the proxy",
    (
        Panel(
            "Chunks handed over",
            "Refused ones found no room, here or there. The receiver computes what it lacks.",
            PER_S,
            {"{{result}}": rate(engine("pushed_chunks_total"), "result")},
        ),
        Panel(
            "Bytes handed over",
            "Received by other engines, and read by them through transfer_channel.",
            BYTES_PER_S,
            {"sent": rate(engine("pushed_bytes_total")), "read": rate(engine("channel_bytes_total"))},
        ),
        Panel(
            "Time after a step",
            "From the end of a step until the receiver had all of it.",
            SECONDS,
            {
                "median": quantile(0.5, engine("push_seconds_bucket")),
                "p99": quantile(0.99, engine("push_seconds_bucket")),
            },
        ),
        Panel(
            "Waited in vain",
            "Requests whose KV did not come within pd_timeout_ms.",
            PER_S,
            {"{{instance}}": rate(engine("handover_timeouts_total"), "instance")},
        ),
        Panel(
            "Proxy: requests",
            "By status, and those under way.",
            NUMBER,
            {
                "{{path}} {{status}} per s": rate(proxy("requests_total"), "path, status"),
                "under way": total(proxy("in_flight")),
            },
        ),
        Panel(
            "Proxy: prefill",
            "Time of a prefill, and streams that began with its token.",
            SECONDS,
            {
                "median": quantile(0.5, proxy("prefill_seconds_bucket")),
                "p99": quantile(0.99, proxy("prefill_seconds_bucket")),
                "first tokens per s": rate(proxy("first_tokens_total")),
            },
        ),
        Panel(
            "Proxy: failures",
            "Fallbacks are answered, but without a prefill engine.",
            PER_S,
            {
                "error {{reason}}": rate(proxy("errors_total"), "reason"),
                "fallback {{reason}}": rate(proxy("fallbacks_total"), "reason"),
            },
        ),
        Panel(
            "Proxy: engines",
            "1: answers, 0: does not. With the requests that each has.",
            NUMBER,
            {
                "{{role}} {{engine}} answers": worst(proxy("engine_healthy"), "role, engine"),
                "{{role}} {{engine}} requests": total(proxy("engine_requests"), "role, engine"),
            },
        ),
        Panel(
            "Proxy: file of engines",
            "1 while it cannot be used as it is now, and the earlier list stays in effect.",
            NUMBER,
            {"{{instance}}": worst(proxy("engines_file_outdated"), "instance")},
        ),
    ),
)
