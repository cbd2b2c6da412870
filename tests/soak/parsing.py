"""Inputs of all kinds to every parser, guided by coverage where a fuzzer is installed."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support.parsers import PARSERS, Parser, mutated

from soak.part import Batch, Do, Part

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT: Final = ROOT / ".soak"
INPUTS: Final = 50_000  # of a batch
_LIMIT_S: Final = 600
_DONE: Final = re.compile(rb"stat::number_of_executed_units:\s*(\d+)")
_ERROR: Final = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|ERROR: libFuzzer)\b: .*$", re.MULTILINE)
_REACHED: Final = re.compile(rb"cov: (\d+)")


class HarmError(Exception):
    """Error for an input that does harm; the message has the input, and the end of what was said."""


def fuzz(module: str, name: str, kept: Path, runs: int, seed: int) -> Batch:
    """Fuzz one parser of a module, from what earlier runs have found.

    Raises:
        HarmError: an input did harm.
    """
    corpus, found = kept / "corpus" / name, kept / "found"
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    command = [sys.executable, "-m", "soak.fuzzing", module, name, str(corpus), str(found), str(runs), str(1 + seed)]
    done = subprocess.run(command, env=_environment(), capture_output=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise HarmError(
            _harm((done.stdout + done.stderr).decode(errors="replace"), sorted(set(found.iterdir()) - before))
        )
    tried, reached = _DONE.search(done.stderr), _REACHED.findall(done.stderr)
    assert tried is not None, done.stderr[-1000:]
    return Batch(int(tried[1]), notes={"guided": int(tried[1])} if reached else {})


def _harm(said: str, inputs: Sequence[Path]) -> str:
    """Return the error and the input in one line."""
    errors = _ERROR.findall(said)
    what = errors[-1] if errors else said[-500:]
    return f"{what} by {inputs[-1]} {inputs[-1].read_bytes()[:300]!r}" if inputs else f"{what} by no input"


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def try_mutated(parser: Parser, runs: int, seed: int) -> Batch:
    """Try changed samples, without coverage.

    Raises:
        HarmError: an input did harm.
    """
    dice, samples = random.Random(seed), parser.samples()
    for _ in range(runs):
        data = mutated(samples, dice)
        try:
            parser.parse(data)
        except Exception as error:
            raise HarmError(f"{error!r} by {data[:300]!r}") from error
    return Batch(runs, notes={"unguided": runs})


@contextmanager
def opened(_: Path) -> Iterator[Do]:
    """Yield batches of inputs to one parser after the other; inputs that reach much are kept for later runs."""
    is_guided = importlib.util.find_spec("atheris") is not None

    def parse(seed: int) -> Batch:
        parser = PARSERS[seed % len(PARSERS)]
        if is_guided:
            return fuzz("support.parsers", parser.name, KEPT, INPUTS, seed)
        return try_mutated(parser, INPUTS, seed)

    yield parse


PART = Part("parsers", "inputs to parsers", 2_000_000, opened)
