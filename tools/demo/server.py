"""Process of ``vllm serve`` with the connector, started as the README shows."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.adapters.vllm.flag import TRANSFER_FLAG, connector_config
from kvstore.tools.processes import free_port
from kvstore.tools.vllmserver import DRAIN_TIMEOUT_S, VllmProcess, find_vllm

BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 4096

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; ignored on a GPU, as is the next variable
    # vLLM would reserve one core for its HTTP front end, which doubles the compute time on two cores.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}


@dataclass
class VllmServer(VllmProcess):
    """Process of the demonstration's vLLM.

    Attributes:
        model: folder of the model.
        config: YAML file of the connector.
        log: file for vLLM's output.
        drains: end vLLM with SIGTERM, so that all writes to disk finish; otherwise kill it.
        role: ``kv_both``, ``kv_producer`` or ``kv_consumer``.
        port: port of the server.
    """

    model: Path
    config: Path
    log: Path
    drains: bool = True
    role: str = "kv_both"
    port: int = field(default_factory=free_port)

    def command(self) -> list[str]:
        """Return the command line."""
        return [
            *(str(find_vllm()), "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(MAX_MODEL_TOKENS)),
            *("--shutdown-timeout", str(DRAIN_TIMEOUT_S)),
            "--enforce-eager",  # compilation would take longer than the demonstration's requests
            *(TRANSFER_FLAG, json.dumps(connector_config(self.role))),
        ]

    def variables(self) -> dict[str, str]:
        """Return its environment, without the caller's settings, which would override the YAML file."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "LMCACHE_"))}
        return {**inherited, **ENVIRONMENT, "KVSTORE_CONFIG_FILE": str(self.config)}
