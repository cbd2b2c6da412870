"""Load of ``cache-pressure``, which sends many contexts and asks for them again, newest first, until one is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.tools.outside.generator import MODEL_NAME, Numbers, Place, UnreadableError, percentile
from kvstore.tools.outside.installing import install

REQUIREMENTS: Final = ("cache-pressure==0.6.3",)
RESULT: Final = "pressure.json"
_CONTEXT_TOKENS: Final = 2000
_CONTEXTS: Final = 16


class CachePressure:
    """Contexts sent once, then in reverse order; the TTFT is that of the second time."""

    name: Final = "cache-pressure"
    about: Final = f"cache-pressure 0.6.3: {_CONTEXTS} contexts of {_CONTEXT_TOKENS:,} tokens, then again, newest first"

    def prepare(self, place: Place) -> None:
        """Install it.

        Raises:
            SkippedError: it cannot be installed.
        """
        install(self._environment(place), REQUIREMENTS)

    def command(self, place: Place, url: str, out: Path) -> Sequence[str]:
        """Return the command line."""
        contexts = place.scaled(_CONTEXTS)
        return [
            *(str(self._environment(place) / "bin" / "cache-pressure"), "--base-url", f"{url}/v1"),
            *("--model", MODEL_NAME, "--kv-size", str(contexts * _CONTEXT_TOKENS), "--num-contexts", str(contexts)),
            *("--context-tokens", str(_CONTEXT_TOKENS), "--output", str(out / RESULT)),
        ]

    def variables(self, place: Place) -> Mapping[str, str]:  # noqa: ARG002 - as the protocol has it
        """Return nothing."""
        return {}

    def read(self, out: Path) -> Numbers:
        """Return the results in ``out``; ``own`` has the share of contexts that were found again.

        Raises:
            UnreadableError: there are none.
        """
        try:
            found = json.loads((out / RESULT).read_text(encoding="utf-8"))
            rows = [*found["hydrate"], *found["verify"]]
            again_s = [row["ttft"] for row in found["verify"] if row["error"] is None]
            cold_s = [row["ttft"] for row in found["hydrate"] if row["error"] is None]
            failed = sum(row["error"] is not None for row in rows)
            return Numbers(
                percentile(again_s, 0.5),
                percentile(again_s, 0.99),
                (len(rows) - failed) / sum(row["e2e"] for row in rows),
                len(rows) - failed,
                failed,
                {"retained": found["retained"] / found["num_contexts"], "TTFT p50 cold": percentile(cold_s, 0.5)},
            )
        except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
            raise UnreadableError(f"cache-pressure left no {RESULT} that can be read: {error!r}") from error

    @staticmethod
    def _environment(place: Place) -> Path:
        return place.folder / "cache-pressure"
