"""Options of the scheduler side for lookups and plans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.choice import LoadRules
from kvstore.adapters.vllm.scheduler.handovers import HandoverOptions
from kvstore.adapters.vllm.telemetry.announcer import ContextOf
from kvstore.config import StoreConfig
from kvstore.engine.options import RemoteOptions


@dataclass(frozen=True)
class SchedulerOptions:
    """The configuration, and what the scheduler side derives from it and from vLLM's.

    Blocks are announced if ``announces`` tells their contexts.
    """

    rules: SaveRules
    config: StoreConfig = field(default_factory=StoreConfig)
    loads: bool = True
    saves: bool = True
    remote: RemoteOptions | None = None
    load_rules: LoadRules = field(default_factory=LoadRules)
    async_save: bool = False
    announces: ContextOf | None = None
    handover: HandoverOptions = field(default_factory=HandoverOptions)

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
