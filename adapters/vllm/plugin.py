"""The entry point in ``vllm.general_plugins``: makes the connector known to vLLM by its name."""

from __future__ import annotations

CONNECTOR_NAME = "KVStoreConnector"
CONNECTOR_MODULE = "kvstore.adapters.vllm.connector"


def register() -> None:
    """Register the connector; vLLM calls this in each of its processes, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - runs inside vLLM

    if CONNECTOR_NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - registering twice raises, and there is no other way to know
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
