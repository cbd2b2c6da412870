"""Goals and floors of bench lines, as fractions of the limit. The bench fails below a floor; goals are targets.

Floors leave room for noise: on two cores with a load below 2, write-behind of an unchanged tree varied from 0.62 to
0.76 (at a load of 6.7 it was 0.34). Its limit hardly needs a core or memory bandwidth, while the path copies and
hashes. Concurrent memcpy and raw writes of as many bytes, on two threads, reach 0.76 of the raw writes alone. On a
quiet machine, investigate a line below its goal even if it is above its floor.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """Goal and floor of a line, as fractions of its limit."""

    goal: float
    floor: float


MOST_RECORDED = "llama-8b"
BOUNDS: dict[str, dict[str, Bound]] = {
    "llama-8b": {
        "CPU store": Bound(0.95, 0.75),
        "CPU retrieve": Bound(0.95, 0.75),
        "CPU store by layer": Bound(0.75, 0.65),
        "CPU retrieve by layer": Bound(0.80, 0.70),
        "disk write-behind": Bound(0.80, 0.45),
        "disk cold retrieve": Bound(0.85, 0.65),
        "disk warm retrieve": Bound(0.70, 0.30),
        "disk layerwise retrieve": Bound(0.77, 0.60),
    },
    "qwen-0.5b": {
        "CPU store": Bound(0.75, 0.50),
        "CPU retrieve": Bound(0.75, 0.50),
        "CPU store by layer": Bound(0.50, 0.40),
        "CPU retrieve by layer": Bound(0.50, 0.40),
        "disk write-behind": Bound(0.70, 0.20),
        "disk cold retrieve": Bound(0.80, 0.30),
        "disk layerwise retrieve": Bound(0.77, 0.40),
        "mooncake store": Bound(0.85, 0.60),
        "mooncake retrieve": Bound(0.85, 0.60),
        "redis retrieve": Bound(0.70, 0.40),
        "server store over TCP": Bound(0.80, 0.35),
        "server retrieve over TCP": Bound(0.80, 0.40),
    },
}

# Defaults for geometries without an entry above. Path, limit and server share two cores, so the floors of remote tiers
# are low. Remote lookups are compared with three round trips: one call took 1.5 to 4.9 ms, depending on the load.
COMMON: dict[str, Bound] = {
    "lookup, 128 known keys": Bound(0.07, 0.035),  # Python calls, where the limit is a loop in C
    "probe behind the last chunk": Bound(0.045, 0.02),
    "lookup, list of 32,768 tokens": Bound(0.45, 0.22),
    "index, a chunk of 16 blocks": Bound(1.0, 1.0),  # counted: no noise
    "adaptive policy, a chunk touched": Bound(1.0, 0.50),
    "KV event, 50,000 chunks of one prefix": Bound(1.0, 0.50),
    "256 lookups at 3 ms, longest pass": Bound(1.0, 0.40),
    "500 requests of 32,768 tokens wait, a step": Bound(1.0, 0.60),
    "load from memory, while a disk hangs": Bound(1.0, 1.0),
    "keys of 131,072 tokens, 1,024 images": Bound(1.0, 0.40),
    "int8 encode, one core": Bound(0.40, 0.10),  # 6 GB/s where memcpy has 15; by numpy a third, as "split encode"
    "int8 decode, one core": Bound(0.40, 0.14),
    "split encode, one core": Bound(0.20, 0.06),  # 3 and 4 GB/s
    "split decode, one core": Bound(0.27, 0.09),
    "GPU to host": Bound(0.90, 0.0),  # not recorded yet
    "host to GPU": Bound(0.90, 0.0),
    "GPU to host by layer": Bound(0.90, 0.0),
    "host to GPU by layer": Bound(0.90, 0.0),
    "import kvstore": Bound(1.0, 0.30),
    "engine start, pool of 4 GiB": Bound(1.0, 0.50),
    "redis store": Bound(0.70, 0.40),
    "redis retrieve": Bound(0.70, 0.50),
    "redis lookup, 128 known keys": Bound(1.0, 0.50),
    "mooncake store": Bound(0.85, 0.60),
    "mooncake retrieve": Bound(0.85, 0.60),
    "object store": Bound(0.85, 0.50),
    "object retrieve": Bound(0.85, 0.50),
    "object store: processor time": Bound(0.80, 0.30),
    "object retrieve: processor time": Bound(0.80, 0.40),
    "SeaweedFS store": Bound(0.85, 0.50),
    "SeaweedFS retrieve": Bound(0.85, 0.50),
    "server store": Bound(0.75, 0.40),
    "server retrieve": Bound(0.75, 0.40),
    "server store over TCP": Bound(0.80, 0.50),
    "server retrieve over TCP": Bound(0.80, 0.50),
    "server lookup, 128 known keys": Bound(1.0, 0.50),
    "server: longest decision, 40,000 chunks": Bound(1.0, 0.50),
    "hand-over over TCP": Bound(0.85, 0.40),
    "hand-over by NIXL": Bound(0.90, 0.40),
    "proxy: added at 100 requests/s": Bound(0.30, 0.10),
    "proxy: processor time of a request": Bound(1.0, 0.45),
    "proxy: processor time, by a forwarder": Bound(0.10, 0.05),
    "vLLM: hit in memory, one token left": Bound(1 / 1.3, 0.55),
    "vLLM: hit in memory, any length": Bound(1.0, 0.70),
    "vLLM: next turn, prefetched from disk": Bound(1.0, 0.70),
    "vLLM: all hooks, no hit": Bound(1.0, 0.50),
    "vLLM: throughput, no hit": Bound(0.97, 0.75),
    "vLLM: start, pool of 4 GiB": Bound(1.0, 0.70),
    "vLLM: hand-over behind a prefill": Bound(1.0, 0.50),
    "vLLM: no connector, again": Bound(0.97, 0.0),  # vLLM compared with itself shows the noise
}


def bound_of(geometry: str, line: str) -> Bound:
    """Return goal and floor of a line; a geometry without records has the goals of Llama-8B and floors of 0."""
    recorded = BOUNDS.get(geometry, {}).get(line) or COMMON.get(line)
    return recorded or BOUNDS[MOST_RECORDED].get(line, Bound(0.0, 0.0))._replace(floor=0.0)
