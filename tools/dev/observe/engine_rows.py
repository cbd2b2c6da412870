"""Rows about engines: benefit, health, room and speed."""

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
    quantile,
    rate,
    total,
    vllm,
    worst,
)

_HITS, _ASKED = engine("hit_tokens_total"), engine("asked_tokens_total")
_LOOKUPS = engine("lookups_total")
_QUOTA_ASKED, _QUOTA_HITS = engine("quota_asked_tokens_total"), engine("quota_hit_tokens_total")
_EVICTED = engine("misses_total", 'reason="evicted"')
_TOO_SLOW = engine("misses_total", 'reason="recompute_faster"')
_CALLS = engine("tier_call_seconds_bucket")
_FAR = 'tier="remote"'
_FAR_HITS = engine("hit_tokens_total", _FAR)

HELPING: Final = Row(
    "Is it helping?",
    (
        Panel(
            "Hit rate",
            "Tokens found, of those that vLLM's own prefix cache lacked. The misses beside it say why it is no higher.",
            FRACTION,
            {"{{model_name}}": f"{rate(_HITS, 'model_name')} / {rate(_ASKED, 'model_name')}"},
        ),
        Panel(
            "Tokens loaded and computed",
            "Loaded tokens by tier, and the rest of the tokens asked for, which vLLM computes.",
            PER_S,
            {"from {{tier}}": rate(_HITS, "tier"), "computed": f"{rate(_ASKED)} - {rate(_HITS)}"},
            is_stacked=True,
        ),
        Panel(
            "Time to first token",
            "vLLM's own. It falls with the hit rate if prompts are long.",
            SECONDS,
            {
                "median {{model_name}}": quantile(0.5, vllm("time_to_first_token_seconds_bucket"), "model_name"),
                "p95 {{model_name}}": quantile(0.95, vllm("time_to_first_token_seconds_bucket"), "model_name"),
            },
        ),
        Panel(
            "Misses by reason",
            "Requests that missed a whole block or more. docs/operations.md explains each reason. "
            "Many of evicted: the tiers are too small.",
            PER_S,
            {"{{reason}}": rate(engine("misses_total"), "reason")},
            is_stacked=True,
        ),
        Panel(
            "Requests looked up, and chunks loaded",
            "Chunks from the GPU tier count among those from memory.",
            PER_S,
            {
                "lookups": rate(_LOOKUPS),
                "chunks from {{tier}}": rate(engine("loaded_chunks_total"), "tier"),
                "of these, from the GPU tier": rate(engine("gpu_loaded_chunks_total")),
            },
        ),
        Panel(
            "vLLM's own prefix cache",
            "Part of the prompt tokens that are still on the GPU. kvstore is asked for the rest.",
            FRACTION,
            {
                "{{model_name}}": f"{rate(vllm('prefix_cache_hits_total'), 'model_name')} / "
                f"{rate(vllm('prefix_cache_queries_total'), 'model_name')}"
            },
        ),
        Panel(
            "Hints of requests, and prefetched chunks",
            "Prompts that clients asked to keep, drop or bring back. Refused ones had no room or no right.",
            PER_S,
            {
                "{{hint}} {{result}}": rate(engine("hints_total"), "hint, result"),
                "prefetched chunks": rate(engine("prefetched_chunks_total")),
            },
        ),
    ),
)

HEALTHY: Final = Row(
    "Is it healthy?",
    (
        Panel(
            "Tiers left out",
            "0: in use; 1: being tried; 2: left out, because its calls fail or hang. Look at the disk, or at the "
            "remote tier's host.",
            NUMBER,
            {"{{instance}} {{tier}}": worst(engine("breaker_state"), "instance, tier")},
        ),
        Panel(
            "Switched on",
            "0 after POST /disable, until POST /enable.",
            NUMBER,
            {"{{instance}}": f"min by (instance) ({engine('enabled')})"},
        ),
        Panel(
            "Draining",
            "1 once kvstore engine drain told it that it will end. As of its last step, as an idle vLLM tells nothing.",
            NUMBER,
            {"{{instance}}": worst(engine("draining"), "instance")},
        ),
        Panel(
            "Wrong bytes found",
            "Always 0. Corrupt chunks: replace the disk. The others: report them. None was served, but see "
            "verified chunks for those that no checksum finds.",
            NUMBER,
            {
                "corrupt, {{tier}}": grown(engine("corrupt_chunks_total"), "tier"),
                "wrong label of a slot": grown(engine("mislabelled_slots_total")),
                "computed differently": grown(engine("verified_chunks_total", 'result="mismatch"')),
            },
        ),
        Panel(
            "Verified chunks",
            "Hits that were also computed, with verify_fraction, and the largest deviation.",
            NUMBER,
            {
                "{{result}} per s": rate(engine("verified_chunks_total"), "result"),
                "largest deviation": f"max({engine('verify_deviation')})",
            },
        ),
        Panel(
            "Failures",
            "Each is a miss, and vLLM computes. Lost chunks are part of the failed loads. Failed copies: lower "
            "--gpu-memory-utilization.",
            PER_S,
            {
                "loads": rate(engine("failed_loads_total")),
                "of these, lost": rate(engine("lost_chunks_total")),
                "stores": rate(engine("failed_stores_total")),
                "copies": rate(engine("failed_copies_total")),
            },
        ),
        Panel(
            "Errors and time-outs of tiers",
            "Calls that failed as a whole, time-outs included. A slot whose read was given up stays out of use.",
            PER_S,
            {
                "errors, {{tier}}": rate(engine("tier_errors_total"), "tier"),
                "time-outs, {{tier}}": rate(engine("tier_timeouts_total"), "tier"),
                "reads given up": rate(engine("read_timeouts_total")),
                "chunks of late calls": rate(engine("held_chunks_total")),
                "clients replaced": rate(engine("client_restarts_total")),
            },
        ),
        Panel(
            "Refused",
            "Chunks for which no slot was free, or that the policy refused; requests with a wrong field.",
            PER_S,
            {
                "chunks": rate(engine("refused_chunks_total")),
                "field {{field}}": rate(engine("request_field_errors_total"), "field"),
            },
        ),
    ),
)

FULL: Final = Row(
    "Is it full?",
    (
        Panel(
            "Memory slots in use",
            "A full memory is normal. Too small is one whose evictions become misses.",
            FRACTION,
            {"{{instance}}": f"{total(engine('used_slots'), 'instance')} / {total(engine('slots'), 'instance')}"},
        ),
        Panel(
            "Disk in use",
            "Of all workers, with the bound of max_local_disk_size.",
            BYTES,
            {
                "{{instance}} used": total(engine("disk_used_bytes"), "instance"),
                "{{instance}} bound": total(engine("disk_capacity_bytes"), "instance"),
            },
        ),
        Panel(
            "Stored, evicted, expired",
            "Evictions near the stores, with many misses of reason evicted, ask for larger tiers.",
            PER_S,
            {
                "stored": rate(engine("stored_chunks_total")),
                "evicted from {{tier}}": rate(engine("evicted_chunks_total"), "tier"),
                "expired": rate(engine("expired_chunks_total")),
            },
        ),
        Panel(
            "Misses because of an eviction",
            "Part of all requests. kvstore simulate says how much a larger tier helps.",
            FRACTION,
            {"evicted": f"{rate(_EVICTED)} / {rate(_LOOKUPS)}"},
        ),
        Panel(
            "Writes to slower tiers",
            "Dropped ones found the queue or the tier full, and stay in memory only.",
            PER_S,
            {"{{tier}} {{result}}": rate(engine("writes_total"), "tier, result")},
        ),
        Panel(
            "Fullest quotas",
            "Part of its quota that a name fills, of those in local_cpu_quotas and local_disk_quotas.",
            FRACTION,
            {
                "{{quota}} {{tier}}": f"topk(10, {total(engine('quota_used_bytes'), 'quota, tier')} / "
                f"{total(engine('quota_capacity_bytes'), 'quota, tier')})"
            },
        ),
        Panel(
            "Hits by quota",
            "Part of the tokens asked for. Low beside a full quota: raise it, if kvstore simulate says that it helps.",
            FRACTION,
            {"{{quota}}": f"{rate(_QUOTA_HITS, 'quota')} / {rate(_QUOTA_ASKED, 'quota')}"},
        ),
        Panel(
            "Evictions and refusals by quota",
            "Chunks that made room, and chunks that found none.",
            PER_S,
            {
                "{{quota}} {{tier}} evicted": rate(engine("quota_evicted_chunks_total"), "quota, tier"),
                "{{quota}} refused": rate(engine("quota_refused_chunks_total"), "quota"),
                "{{quota}} stored": rate(engine("quota_stored_chunks_total"), "quota"),
            },
        ),
        Panel(
            "Kept from eviction",
            "Leases of plans and pins, retained chunks, and all chunks for comparison.",
            NUMBER,
            {
                "leases": total(engine("leases")),
                "retained": total(engine("retained_chunks")),
                "all": total(engine("known_chunks")),
            },
        ),
    ),
)

SLOW: Final = Row(
    "Is it slow?",
    (
        Panel(
            "Throughput",
            "Bytes between the paged cache and memory, and between memory and slower tiers.",
            BYTES_PER_S,
            {"{{tier}} {{direction}}": rate(engine("moved_bytes_total"), "tier, direction")},
        ),
        Panel(
            "Calls to slower tiers",
            "The slowest percent, by tier and direction.",
            SECONDS,
            {"{{tier}} {{direction}}": quantile(0.99, _CALLS, "tier, direction")},
        ),
        Panel(
            "Waits of a request",
            "Time that a worker waits for a request's loads, and takes to gather its stores.",
            SECONDS,
            {
                "load, median": quantile(0.5, engine("load_seconds_bucket")),
                "load, p99": quantile(0.99, engine("load_seconds_bucket")),
                "store, median": quantile(0.5, engine("store_seconds_bucket")),
                "store, p99": quantile(0.99, engine("store_seconds_bucket")),
            },
        ),
        Panel(
            "Slower than computing",
            "Part of all requests whose chunks were there, but would have loaded more slowly than vLLM computes.",
            FRACTION,
            {"{{model_name}}": f"{rate(_TOO_SLOW, 'model_name')} / {rate(_LOOKUPS, 'model_name')}"},
        ),
        Panel(
            "Queue of writes",
            "Chunks waiting for a slower tier. Beyond max_write_queue they are dropped.",
            NUMBER,
            {"{{instance}} {{tier}}": total(engine("queued_writes"), "instance, tier")},
        ),
    ),
)

REMOTE: Final = Row(
    "Object stores, Redis and other remote tiers, as engines see them",
    (
        Panel(
            "Tokens found there",
            "Part of the tokens asked for.",
            FRACTION,
            {"{{model_name}}": f"{rate(_FAR_HITS, 'model_name')} / {rate(_ASKED, 'model_name')}"},
        ),
        Panel(
            "Bytes",
            "From and to the remote tier.",
            BYTES_PER_S,
            {"{{direction}}": rate(engine("moved_bytes_total", _FAR), "direction")},
        ),
        Panel(
            "Time of a call",
            "Median and slowest percent.",
            SECONDS,
            {
                "{{direction}}, median": quantile(0.5, engine("tier_call_seconds_bucket", _FAR), "direction"),
                "{{direction}}, p99": quantile(0.99, engine("tier_call_seconds_bucket", _FAR), "direction"),
            },
        ),
        Panel(
            "Failures",
            "A late lookup is a miss of reason never_stored: raise lookup_timeout_ms, or look at the network.",
            PER_S,
            {
                "late lookups": rate(engine("lookup_timeouts_total")),
                "errors": rate(engine("tier_errors_total", _FAR)),
                "writes, {{result}}": rate(engine("writes_total", _FAR, 'result!="done"'), "result"),
                "corrupt": rate(engine("corrupt_chunks_total", _FAR)),
            },
        ),
    ),
)
