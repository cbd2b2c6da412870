"""Load of LMBenchmark's multi-round QA, unchanged, from a checkout that the user names, as no registry has it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.tools.outside.generator import MODEL_NAME, Numbers, Place, SkippedError, UnreadableError, percentile
from kvstore.tools.outside.installing import install

REQUIREMENTS: Final = ("openai==2.43.0", "pandas==2.3.3")
SCRIPT: Final = Path("synthetic-multi-round-qa") / "multi-round-qa.py"
RESULT: Final = "rounds.csv"
_USERS: Final = 8
_ROUNDS: Final = 6
_TIME_S: Final = 40
_SYSTEM_WORDS: Final = 100  # a word is three tokens of our model
_HISTORY_WORDS: Final = 500
_ANSWER_TOKENS: Final = 8


class LMBenchmark:
    """Users who ask again and again behind a long history."""

    name: Final = "lmbenchmark"
    about: Final = f"LMBenchmark, synthetic multi-round QA: {_USERS} users, {_ROUNDS} rounds, for {_TIME_S} s"

    def prepare(self, place: Place) -> None:
        """Install what the script imports.

        Raises:
            SkippedError: there is no checkout, or its packages cannot be installed.
        """
        if place.lmbenchmark is None:
            raise SkippedError("no registry has it: name a checkout of github.com/LMCache/LMBenchmark by --lmbenchmark")
        if not (place.lmbenchmark / SCRIPT).is_file():
            raise SkippedError(f"{place.lmbenchmark / SCRIPT} does not exist")
        install(self._environment(place), REQUIREMENTS)

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        """Return the command line."""
        assert place.lmbenchmark is not None
        python = str(self._environment(place) / "bin" / "python")
        return [
            *(python, str((place.lmbenchmark / SCRIPT).absolute()), "--model", MODEL_NAME, "--base-url", f"{url}/v1"),
            *("--num-users", str(_USERS), "--num-rounds", str(_ROUNDS), "--qps", "2", "--init-user-id", "1"),
            *("--shared-system-prompt", str(_SYSTEM_WORDS), "--user-history-prompt", str(_HISTORY_WORDS)),
            *("--answer-len", str(_ANSWER_TOKENS), "--log-interval", "10", "--time", str(place.scaled(_TIME_S))),
            *("--output", str(out / RESULT)),
        ]

    def variables(self, place: Place) -> Mapping[str, str]:  # noqa: ARG002 - as the protocol has it
        """Return the key that its client insists on."""
        return {"OPENAI_API_KEY": "none"}

    def read(self, out: Path) -> Numbers:
        """Return the results in ``out``. The script tells nothing of failed requests, and goes on without them.

        Raises:
            UnreadableError: there are none.
        """
        try:
            with (out / RESULT).open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            ttft_s = [float(row["ttft"]) for row in rows]
            seconds = max(float(row["finish_time"]) for row in rows) - min(float(row["launch_time"]) for row in rows)
            return Numbers(percentile(ttft_s, 0.5), percentile(ttft_s, 0.99), len(rows) / seconds, len(rows), 0)
        except (OSError, ValueError, LookupError, ZeroDivisionError) as error:
            raise UnreadableError(f"multi-round-qa.py left no {RESULT} that can be read: {error!r}") from error

    @staticmethod
    def _environment(place: Place) -> Path:
        return place.folder / "lmbenchmark"
