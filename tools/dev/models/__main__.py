"""Tries kvstore with a tiny random model of every architecture, under real vLLM on the CPU.

Takes the architectures that vLLM generates text with and transformers can build. For each, it records whether vLLM runs
it here, its KV cache groups, the tokens of a hit, and whether outputs equal plain vLLM's. Results are lines of JSON; a
run continues where the last one ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvstore.tools.dev.arguments import parser_of

ROOT: Final = Path(__file__).resolve().parents[3]
EXAMPLE: Final = """examples:
  make models                                        those not tried yet; about half a minute each
  make models ARGS="--only Gemma3ForCausalLM --again"  one of them, once more
"""
COMMAND: Final = (sys.executable, "-m", "kvstore.tools.dev.models.trial")
_MARK: Final = "TRIAL "
_REFUSAL: Final = "kvstore.model.errors.LayoutError"  # the error's reason is kept
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

Result = dict[str, Any]
"""Result of an architecture: the finished stages of its trial, and the error that ended it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try architectures without results, print the table, and return the exit status."""
    parser = parser_of("models", __doc__, EXAMPLE)
    parser.add_argument("--only", metavar="NAME", action="append", help="an architecture, as vLLM calls it")
    parser.add_argument("--again", action="store_true", help="also those of which there are results")
    parser.add_argument("--results", type=Path, default=ROOT / ".models.jsonl", help="lines of JSON")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one architecture")
    given = parser.parse_args(arguments)
    names = [name for name in architectures() if not given.only or name in given.only]
    if not names or given.timeout <= 0:
        parser.error(f"nothing to do: --only {given.only}, --timeout {given.timeout}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    results = read(given.results)
    for name in names:
        if name in results and not given.again:
            continue
        results[name] = attempt(name, given.timeout)
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(results[name]) + "\n")
        console.print(f"{verdict(results[name]):<12} {name}", highlight=False)
    wanted = [results[name] for name in names]
    console.print(table(wanted))
    console.print(summary(wanted), highlight=False)
    return 1 if any(verdict(result) in {"failed", "unequal"} for result in wanted) else 0


def architectures() -> list[str]:
    """Return the names of architectures in vLLM's registry."""
    from kvstore.tools.dev.models import shapes  # noqa: PLC0415 - vLLM and transformers take seconds

    return list(shapes.architectures())


def read(path: Path) -> dict[str, Result]:
    """Return the last result of each architecture."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["architecture"]: result for result in map(json.loads, lines)}


def attempt(name: str, timeout_s: float) -> Result:
    """Try one architecture in a separate process."""
    with tempfile.TemporaryDirectory(prefix="kvstore-models-") as folder:
        command = [*COMMAND, name, str(Path(folder) / "model")]
        try:
            done = subprocess.run(  # noqa: S603 - made here
                command,
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return {**stages(name, _text(error.stdout)), "error": f"not done after {timeout_s:.0f} s"}
    result = stages(name, done.stdout)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        result["error"] = next((line for line in reversed(lines) if "Error" in line), lines[-1])[:300]
    return result


def stages(name: str, output: str) -> Result:
    """Return the stages that a trial has printed."""
    result: Result = {"architecture": name}
    for line in output.splitlines():
        if line.startswith(_MARK):
            result |= json.loads(line.removeprefix(_MARK))
    return result


def verdict(result: Mapping[str, Any]) -> str:
    """Return the verdict of a result."""
    if "built" not in result:
        return "not built"
    if "own_cached" not in result:
        return "not run"  # by vLLM itself
    if "cached" not in result:
        return "refused" if _REFUSAL in result.get("error", "") else "failed"
    if not any(result["cached"]):
        return "no hit"
    return "equal" if result["equal"] or result["equal_own"] else "unequal"


def table(results: Sequence[Result]) -> Table:
    """Return a table with a row for each architecture."""
    shown = Table("architecture", "verdict", "runs", "groups", "hit", "vLLM's own", "remark")
    for result in results:
        groups = Counter(name.removesuffix("Spec") for name in result.get("groups", ()))
        shown.add_row(
            result["architecture"],
            verdict(result),
            result.get("runs", "-"),
            ", ".join(f"{count} {name}" for name, count in groups.items()),
            _numbers(result.get("cached")),
            _numbers(result.get("own_cached")),
            result.get("error") or ("" if result.get("differs", True) else "answers do not depend on the prompt"),
        )
    return shown


def summary(results: Sequence[Result]) -> str:
    """Return a sentence with the number of architectures that work, of those that vLLM runs here."""
    verdicts = Counter(verdict(result) for result in results)
    running = sum(verdicts.values()) - verdicts["not built"] - verdicts["not run"]
    others = f"{verdicts['not run']} do not run on this CPU, {verdicts['not built']} cannot be built"
    return f"{verdicts['equal']} of {running} that run: a hit, and equal outputs. {others}"


def _numbers(values: Sequence[int] | None) -> str:
    return "-" if values is None else " ".join(map(str, values))


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    sys.exit(main())
