"""vLLM's flag for a connector, and its value for kvstore."""

from __future__ import annotations

from typing import Final

CONNECTOR_NAME: Final = "KVStoreConnector"
CONNECTOR_MODULE: Final = "kvstore.adapters.vllm.connector"
TRANSFER_FLAG: Final = "--kv-transfer-config"
_SETTING: Final = f'{{"kv_connector":"{CONNECTOR_NAME}","kv_role":"kv_both","kv_load_failure_policy":"recompute"}}'
CONNECTOR_FLAG: Final = f"{TRANSFER_FLAG} '{_SETTING}'"
"""The flag with which vLLM uses kvstore, as a shell reads it."""
