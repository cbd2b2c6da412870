"""Load of AIPerf, which replays recorded sessions of Claude Code by its own loader for such traces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.tools.outside import traces
from kvstore.tools.outside.generator import MODEL_NAME, SEED, Numbers, Place, UnreadableError
from kvstore.tools.outside.installing import install

REQUIREMENTS: Final = ("aiperf==0.13.0",)
RESULT: Final = "profile_export_aiperf.json"
_TRACES: Final = ("kv-cache-tester/traces", "claude_code_weka.jsonl.xz")  # a checkout, or its sessions as lines
_TOKENIZER: Final = f"local/{MODEL_NAME}"
_REVISION: Final = "0" * 40
_TOKENIZER_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json")


class AIPerf:
    """Sessions of Claude Code, shrunk, all at once."""

    name: Final = "aiperf-claude-code"
    about: Final = (
        f"AIPerf 0.13, weka_trace: {traces.SESSIONS} sessions of Claude Code at once, one of 32 blocks, "
        f"{traces.PAUSE_S:.0f} s between requests"
    )

    def prepare(self, place: Place) -> None:
        """Install it, convert the trace, and lay the tokenizer out as a hub's cache.

        AIPerf's workers take a tokenizer by its name only.

        Raises:
            SkippedError: it cannot be installed, or the trace is not there.
        """
        file = place.trace("github.com/callanjfox/kv-cache-tester", *_TRACES)
        traces.shrink_weka(file, place.runs / "weka", sessions=place.scaled(traces.SESSIONS))
        install(self._environment(place), REQUIREMENTS)
        cached = place.folder / "hub" / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
        snapshot = cached / "snapshots" / _REVISION
        for folder in (snapshot, cached / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(_REVISION, encoding="utf-8")
        for name in _TOKENIZER_FILES:
            shutil.copyfile(place.model / name, snapshot / name)

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        """Return the command line."""
        return [
            *(str(self._environment(place) / "bin" / "aiperf"), "profile", "--model", MODEL_NAME),
            *("--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", _TOKENIZER),
            *("--custom-dataset-type", "weka_trace", "--input-file", str(place.runs / "weka")),
            *(
                "--num-sessions",
                str(place.scaled(traces.SESSIONS)),
                "--concurrency",
                str(place.scaled(traces.SESSIONS)),
            ),
            *("--random-seed", str(SEED), "--ui", "none", "--workers-max", "1", "--record-processors", "1"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--output-artifact-dir", str(out)),
        ]

    def variables(self, place: Place) -> Mapping[str, str]:
        """Return the place of the tokenizer."""
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return {**offline, "HF_HOME": str((place.folder / "hub").absolute())}

    def read(self, out: Path) -> Numbers:
        """Return the results in ``out``.

        Raises:
            UnreadableError: there are none.
        """
        try:
            found = json.loads((out / RESULT).read_text(encoding="utf-8"))
            ttft = found["time_to_first_token"]
            errors = found.get("error_request_count") or {"avg": 0}
            return Numbers(
                ttft["p50"] / 1e3,
                ttft["p99"] / 1e3,
                found["request_throughput"]["avg"],
                int(found["request_count"]["avg"]),
                int(errors["avg"]),
                {
                    "output tokens/s": found["output_token_throughput"]["avg"],
                    "hits with endless room": found["theoretical_prefix_cache_hit"]["avg"] / 100,
                },
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UnreadableError(f"AIPerf left no {RESULT} that can be read: {error!r}") from error

    @staticmethod
    def _environment(place: Place) -> Path:
        return place.folder / "aiperf"
