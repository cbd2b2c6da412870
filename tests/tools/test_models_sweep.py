"""The sweep over architectures: its trials, their outcomes, and its counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.dev.models import __main__ as sweep

OWN: dict[str, Any] = {
    "built": True,
    "runs": "float32",
    "groups": ["MambaSpec", "MambaSpec", "FullAttentionSpec"],
    "own_cached": [64],
}
DONE: dict[str, dict[str, Any]] = {
    "Equal": OWN | {"cached": [64], "equal": True, "equal_own": False},
    "EqualToOwn": OWN | {"cached": [64], "equal": False, "equal_own": True},
    "Unequal": OWN | {"cached": [64], "equal": False, "equal_own": False},
    "NoHit": OWN | {"cached": [0], "equal": True, "equal_own": True},
    "Failed": OWN | {"error": "RuntimeError: no"},
    "Refused": OWN | {"error": "[rank0]: kvstore.model.errors.LayoutError: no"},
    "NotRun": {"built": True, "error": "no kernel"},
    "NotBuilt": {"error": "AttributeError: layers"},
}
VERDICTS = ["equal", "equal", "unequal", "no hit", "failed", "refused", "not run", "not built"]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the architectures that were tried; their trials end as ``DONE`` says."""
    names: list[str] = []

    def attempt(name: str, timeout_s: float) -> dict[str, Any]:
        names.append(name)
        return {"architecture": name, **DONE[name]}

    monkeypatch.setattr(sweep, "architectures", lambda: list(DONE))
    monkeypatch.setattr(sweep, "attempt", attempt)
    return names


def test_one_word_for_each_end() -> None:
    assert [sweep.verdict(result) for result in DONE.values()] == VERDICTS


def test_what_is_not_run_by_vllm_itself_does_not_count(
    tried: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(["--results", str(tmp_path / "results")]) == 1
    said = capsys.readouterr().out
    assert "2 of 6 that run" in said
    assert "1 do not run on this CPU, 1 cannot be built" in said
    assert "2 Mamba, 1 FullAttention" in said


def test_a_run_goes_on_where_the_last_one_ended(tried: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert sweep.main(["--results", str(results), "--only", "Equal"]) == 0
    sweep.main(["--results", str(results)])
    assert tried == list(DONE)
    assert sweep.main(["--results", str(results), "--only", "Equal", "--again"]) == 0
    assert tried == [*DONE, "Equal"]
    lines = [json.loads(line)["architecture"] for line in results.read_text().splitlines()]
    assert lines == tried


def test_a_trial_that_dies_or_hangs_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tmp_path / "trial.py"
    trial.write_text(
        "import sys, time\n"
        "print('TRIAL {\"built\": true}', flush=True)\n"
        "if sys.argv[1] == 'hangs': time.sleep(60)\n"
        "raise ValueError('no kernel')\n"
    )
    monkeypatch.setattr(sweep, "COMMAND", [sys.executable, str(trial)])
    dies = sweep.attempt("dies", 30.0)
    assert dies == {"architecture": "dies", "built": True, "error": "ValueError: no kernel"}
    hangs = sweep.attempt("hangs", 0.5)
    assert "not done" in hangs["error"]
