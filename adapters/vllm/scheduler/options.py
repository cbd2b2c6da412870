"""Options of the scheduler side for lookups and plans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.engine.options import RemoteOptions
from kvstore.policies import Adaptive


@dataclass(frozen=True)
class SchedulerOptions:
    """The scheduler side's part of the configuration."""

    rules: SaveRules
    loads: bool = True
    saves: bool = True
    local_cpu: bool = True
    priority_limit: int | None = None
    min_retrieve_tokens: int = 0
    min_remote_tokens: int = 0
    max_tokens_per_load: int = 0
    max_write_queue: int | None = None
    remote: RemoteOptions | None = None
    cache_policy: str = Adaptive.name
    disk_policy: str | None = None
    record_trace: Path | None = None
    load_rules: LoadRules = field(default_factory=LoadRules)
    async_save: bool = False
    announces: bool = False
    verify_fraction: float = 0.0
    handover: HandoverOptions = field(default_factory=HandoverOptions)
    pin_max_s: float = 86_400.0
    checkpoint_interval_tokens: int = 0
    log_request_sample: int = 0

    def load_rules_for(self, num_ranks: int) -> LoadRules:
        """Return the rules by which ``num_ranks`` ranks load.

        A rank knows only what it could not load itself, and computes on what another rank could not load. KV that it
        has sent before the scheduler learns of the failure cannot be taken back. So where ranks send the KV of a step
        to another engine or a remote tier, every load is asynchronous: nothing is computed before all ranks have loaded
        their parts.
        """
        stores_there = self.saves and self.remote is not None and self.remote.max_queue != 0
        sends = stores_there or self.handover.sends
        return replace(self.load_rules, async_load=True) if num_ranks > 1 and sends else self.load_rules
