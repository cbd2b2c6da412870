"""Fuzzing of one parser in a process of its own, guided by the branches that an input reaches.

Its arguments are MODULE NAME CORPUS FOUND RUNS SEED: MODULE has ``PARSERS``. It adds inputs that reach something new to
the folder CORPUS, writes one that does harm to the folder FOUND, and ends then with a status that is not 0.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Final

_TIME_S: Final = 60
_TIMEOUT_S: Final = 20  # of one input
_MEMORY_MIB: Final = 2048
_MAX_BYTES: Final = 1 << 14


def main() -> None:
    """Fuzz until so many inputs were tried, the time is over, or an input does harm."""
    import atheris

    module, name, corpus, found, runs, seed = sys.argv[1:]
    with atheris.instrument_imports(include=["kvstore", module], enable_loader_override=False):
        parsers = importlib.import_module(module).PARSERS
        mutated = importlib.import_module("support.parsers").mutated
    parser = next(parser for parser in parsers if parser.name == name)
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(parser.samples()):
        Path(corpus, f"sample-{number}").write_bytes(sample)
    options = {
        "runs": runs,
        "seed": seed,
        "max_total_time": _TIME_S,
        "max_len": _MAX_BYTES,
        "timeout": _TIMEOUT_S,
        "rss_limit_mb": _MEMORY_MIB,
        "artifact_prefix": f"{found}/{name}-",
        "print_final_stats": 1,
    }
    samples = parser.samples()

    def changed(data: bytes, most_bytes: int, number: int) -> bytes:
        """Change an input by its words, or as the fuzzer itself does."""
        if number % 2:
            new: bytes = mutated([data, *samples], random.Random(number))[:most_bytes]
        else:
            new = atheris.Mutate(data, most_bytes)
        return new

    def parse(data: bytes) -> None:
        parser.parse(data)

    words = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), corpus]
    atheris.Setup(words, parse, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
