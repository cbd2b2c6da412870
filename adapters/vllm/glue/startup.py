"""Start-up report in vLLM's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import vllm

from kvstore.adapters.vllm.scheduler.startup import Surroundings, problems_of, startup_lines

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvstore.adapters.vllm.plan import WorkerFacts
    from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
    from kvstore.config import LoadedConfig
    from kvstore.index.index import ChunkIndex

logger = logging.getLogger(__name__)


def tell_start(
    vllm_config: VllmConfig,
    loaded: LoadedConfig,
    options: SchedulerOptions,
    index: ChunkIndex | None,
    facts: Sequence[WorkerFacts],
) -> None:
    """Log one block once the workers' facts are known, as a warning if a tier cannot be used."""
    transfer = vllm_config.kv_transfer_config
    around = Surroundings(vllm.__version__, str(transfer.kv_role), transfer.kv_load_failure_policy)
    found = len(index) if index is not None else 0
    level = logging.WARNING if problems_of(facts) else logging.INFO
    logger.log(level, "%s", "\n".join(startup_lines(loaded, options, around, facts, found)))
