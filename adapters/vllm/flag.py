"""vLLM's flag for a connector, and its value for kvstore."""

from __future__ import annotations

import json
from typing import Final

CONNECTOR_NAME: Final = "KVStoreConnector"
CONNECTOR_MODULE: Final = "kvstore.adapters.vllm.connector"
TRANSFER_FLAG: Final = "--kv-transfer-config"


def connector_config(kv_role: str = "kv_both") -> dict[str, object]:
    """Return the flag's value without settings. Requests whose loads fail are computed."""
    return {"kv_connector": CONNECTOR_NAME, "kv_role": kv_role, "kv_load_failure_policy": "recompute"}


CONNECTOR_FLAG: Final = f"{TRANSFER_FLAG} '{json.dumps(connector_config(), separators=(',', ':'))}'"
"""The flag with which vLLM uses kvstore, as a shell reads it."""
