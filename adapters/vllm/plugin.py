"""The entry point in ``vllm.general_plugins``, which registers the connector with vLLM under its name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvstore.adapters.vllm import refusals
from kvstore.adapters.vllm.flag import CONNECTOR_MODULE, CONNECTOR_NAME, TRANSFER_FLAG
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def register() -> None:
    """Register the connector; vLLM calls this in each of its processes, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - runs inside vLLM

    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - registering twice raises; no public test
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    if refusals.is_first_process():
        refusals.check_first(_check)
        if refusals.is_command():
            refusals.print_at_end()


def _check(vllm_config: VllmConfig) -> None:
    """Refuse what can be refused before anything is started.

    Raises:
        ConfigError: the configuration, a flag or the version of vLLM cannot be used.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None and refusals.is_command() and _is_flag_empty(sys.argv):
        raise ConfigError(
            f"{TRANSFER_FLAG} is empty, so vLLM would start without kvstore: run the command that should print its "
            "value, such as kvstore flags, alone to see its error"
        )
    if transfer is None or transfer.kv_connector != CONNECTOR_NAME:
        return  # also if it is one of several, to which vLLM gives their configurations later
    from kvstore.adapters.vllm.glue.support import check_flags  # noqa: PLC0415 - not in every vLLM
    from kvstore.config import load_config  # noqa: PLC0415

    check_flags(vllm_config, load_config(transfer.kv_connector_extra_config, log_warnings=False).config)


def _is_flag_empty(words: Sequence[str]) -> bool:
    """Tell if a shell left the flag's value empty, which vLLM treats as no flag."""
    return f"{TRANSFER_FLAG}=" in words or (TRANSFER_FLAG, "") in pairwise(words) or words[-1:] == [TRANSFER_FLAG]
