"""GB/s of one transfer between two processes, by every way there is, in one run: a table.

    PYTHONPATH=tests python tests/e2e/handover_speeds.py

First vLLM's own NixlConnector, between two real vLLMs on the CPU; its seconds are vLLM's metric. Then ours between two
processes without a model, over TCP beside a plain socket, and by NIXL beside a bare loop of its reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from kvstore.tools.bench.geometry import Geometry
from kvstore.tools.bench.handover import measure_handover
from kvstore.tools.bench.workbench import Workbench
from kvstore.tools.demo.pair import EngineServer
from kvstore.tools.models import LlamaShape, build_llama, random_tokens
from kvstore.tools.processes import free_port

SHAPE = LlamaShape(layers=8, hidden=256, heads=8, kv_heads=8, head_dim=128, intermediate=256, vocab=1281)
# Half the bytes per element and twice the elements, so that a chunk of 256 tokens has 16 MiB, as in float32.
GEOMETRY = Geometry("same", layers=SHAPE.layers, kv_heads=SHAPE.kv_heads, head_size=2 * SHAPE.head_dim)
NUM_CHUNKS = 6
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
KEPT = {"do_remote_decode": True, "do_remote_prefill": False}
UNKNOWN = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))


class NixlServer(EngineServer):
    """vLLM with its NixlConnector."""

    def command(self) -> list[str]:
        command = super().command()
        command[command.index("--kv-transfer-config") + 1] = json.dumps(CONNECTOR)
        return command

    def ask(self, tokens: list[int], passed: dict[str, Any]) -> dict[str, Any]:
        """Have one token computed; return the answer's description of the KV that the engine keeps."""
        body = {"model": str(self.model), "prompt": tokens, "max_tokens": 1, "temperature": 0}
        with httpx.Client(trust_env=False, timeout=300) as asker:
            answer = asker.post(f"{self.url}/v1/completions", json={**body, "kv_transfer_params": passed})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json().get("kv_transfer_params") or {}
        return found

    def sums(self) -> tuple[float, float]:
        """Return the bytes received by NIXL, and the seconds that this took."""
        with httpx.Client(trust_env=False, timeout=30) as asker:
            lines = [line.split() for line in asker.get(f"{self.url}/metrics").text.splitlines()]
        found = {line[0].split("{")[0]: float(line[-1]) for line in lines if line and line[0].startswith("vllm:nixl")}
        return found["vllm:nixl_bytes_transferred_sum"], found["vllm:nixl_xfer_time_seconds_sum"]


def nixl_server(model: Path, folder: Path, core: int) -> NixlServer:
    """Return a server that is not started."""
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    log = folder / f"{core}.log"
    uncached = ("--no-enable-prefix-caching",)
    return NixlServer(model, Path(os.devnull), log, drains=False, arguments=uncached, environment=side, cores=str(core))


def measure_connector(folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Return bytes and seconds of each transfer by vLLM's NixlConnector."""
    model = build_llama(folder / "model", SHAPE)
    found: list[tuple[float, float]] = []
    with nixl_server(model, folder, 0) as prefill, nixl_server(model, folder, 1) as decode:
        before = (0.0, 0.0)
        for seed in range(rounds):
            tokens = random_tokens(NUM_CHUNKS * GEOMETRY.chunk_tokens + 1, seed=seed, vocab=SHAPE.vocab)
            kept = prefill.ask(tokens, {**KEPT, **UNKNOWN})
            decode.ask(tokens, kept)
            decode.ask(tokens[:2], {})  # a step that reports the transfer before it
            sums = decode.sums()
            found.append((sums[0] - before[0], sums[1] - before[1]))
            before = sums
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print(f"{'way':40} {'MiB':>6} {'GB/s':>6} {'limit':>6} {'of it':>6}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        moved = [one for one in measure_connector(Path(folder), given.rounds) if one[1]]
    gb_s = statistics.median(num_bytes / seconds / 1e9 for num_bytes, seconds in moved)
    mib = statistics.median(num_bytes for num_bytes, _ in moved) / (1 << 20)
    print(f"{'NixlConnector of vLLM':40} {mib:6.1f} {gb_s:6.2f}", flush=True)
    bench = Workbench(GEOMETRY, NUM_CHUNKS)
    for channel in (None, "nixl"):
        for line in measure_handover(bench, given.rounds, lambda *_: None, channel):
            mib = line.size_bytes / (1 << 20)
            path, limit = (line.size_bytes / seconds / 1e9 for seconds in (line.path_s, line.limit_s))
            print(f"{line.subject.name:40} {mib:6.1f} {path:6.2f} {limit:6.2f} {line.fraction:6.2f}", flush=True)


if __name__ == "__main__":
    main()
