"""Results of ``make release``: the same wheel anywhere, a changelog in its format, licences, a bill of materials."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import cast

import pytest

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.tools.dev.release.__main__ import release
from kvstore.tools.dev.release.changelog import changelog_problems
from kvstore.tools.dev.release.checkout import files
from kvstore.tools.dev.release.installed import Package, declared, packages
from kvstore.tools.dev.release.licences import UNKNOWN, expression_of, is_permissive, licences
from kvstore.tools.dev.release.wheel import build_wheel

ROOT = Path(__file__).resolve().parents[2]
COMMIT_S = 1_700_000_000


def commit(folder: Path, *, at_s: int = COMMIT_S) -> None:
    names = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@b"}
    environment = {**os.environ, **names, "GIT_COMMITTER_DATE": f"{at_s} +0000", "GIT_AUTHOR_DATE": f"{at_s} +0000"}
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "All"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True, env=environment)


def copy_package(folder: Path) -> None:
    """Copy all that gets into a wheel, with the links between folders."""
    for name in files(ROOT):
        if name.partition("/")[0] not in {"deploy", "docs", "tests"}:
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy, follow_symlinks=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("one")
    copy_package(folder)
    commit(folder)
    return folder


@pytest.fixture(scope="module")
def made(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return release(checkout, tmp_path_factory.mktemp("dist"))


def test_a_wheel_has_the_same_bytes_in_any_folder_and_at_any_time(made: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "another"
    copy_package(other)
    commit(other)
    (other / "build" / "lib" / "kvstore").mkdir(parents=True)
    (other / "build" / "lib" / "kvstore" / "left.py").touch()  # by another build; git ignores it
    for path in other.rglob("*.py"):
        os.utime(path, (0, 1_000_000_000))
        path.chmod(0o700)
    before = os.umask(0o077)
    try:
        wheel = build_wheel(other, tmp_path / "dist")
    finally:
        os.umask(before)
    assert wheel.name == made[0].name == f"vllm_kvstore-{__version__}-py3-none-any.whl"
    assert wheel.read_bytes() == made[0].read_bytes()


def test_an_earlier_wheel_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "vllm_kvstore-0.0.1-py3-none-any.whl").touch()
    (tmp_path / "other.whl").touch()
    with pytest.raises(ConfigError, match="not a checkout"):
        build_wheel(tmp_path, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # nothing is removed for a build that cannot begin


def test_the_bill_of_materials_names_all_that_is_required(made: list[Path]) -> None:
    (path,) = (path for path in made if path.name.endswith(".cdx.json"))
    bill = json.loads(path.read_text())
    assert (bill["bomFormat"], bill["metadata"]["timestamp"][:10]) == ("CycloneDX", "2023-11-14")
    assert bill["metadata"]["component"]["version"] == __version__
    listed = {each["name"]: each for each in bill["components"]}
    asked = {requirement.name.lower() for each in declared(ROOT).values() for requirement in each}
    assert asked - {"vllm-kvstore"} <= listed.keys()
    assert "pytest" not in listed  # of the developers
    assert [listed[name]["scope"] for name in ("numpy", "pydantic-core", "redis")] == ["required"] * 2 + ["optional"]
    assert {"name": "kvstore:required:redis", "value": ">=5.2"} in listed["redis"]["properties"]


def test_every_package_has_its_line_of_licence(made: list[Path]) -> None:
    (path,) = (path for path in made if path.name.endswith("-licences.md"))
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + len(packages(declared(ROOT)))
    assert any(line.startswith("| pydantic | 2.") and "| MIT |" in line for line in lines)


def test_a_tag_without_its_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n### Added\n- A thing.\n")
    commit(tmp_path)
    subprocess.run(["git", "-C", str(tmp_path), "tag", f"v{__version__}"], check=True)
    with pytest.raises(ConfigError, match=rf"there is no '## \[{__version__}\]', and the commit has its tag"):
        release(tmp_path, tmp_path / "dist")


GOOD = """# Changelog

## [Unreleased]

### Added
- A thing.

## [0.2.0] - 2026-02-28

### Fixed
- It.

## [0.1.0] - 2026-01-31
"""


@pytest.mark.parametrize(
    ("old", "new", "version", "complaint"),
    [
        ("", "", "0.3.0", ""),
        ("", "", "0.2.0", ""),
        ("", "", "0.1.5", "0.2.0 is newer"),
        ("### Added\n- A thing.\n", "", "0.3.0", "nor anything in"),
        ("## [Unreleased]", "## Unreleased", "0.2.0", "is no section"),
        ("### Fixed", "### Mended", "0.2.0", "not one of"),
        ("- It.", "- It.\n### Fixed", "0.2.0", "more than once"),
        (" - 2026-01-31", "", "0.2.0", "has no date"),
        ("2026-02-28", "2026-02-30", "0.2.0", "has no date"),
        ("[0.1.0]", "[0.2.0]", "0.2.0", "comes after 0.2.0"),
        ("[0.1.0]", "[first]", "0.2.0", "names no version"),
        ("[0.1.0] - 2026-01-31", "[Unreleased]", "0.2.0", "comes first"),
    ],
)
def test_the_format_of_a_changelog(old: str, new: str, version: str, complaint: str) -> None:
    found = list(changelog_problems(GOOD.replace(old, new), version, is_release=False))
    assert bool(found) is bool(complaint), found
    assert complaint in "\n".join(found)


def test_a_release_needs_its_section() -> None:
    assert list(changelog_problems(GOOD, "0.3.0", is_release=True))
    assert not list(changelog_problems(GOOD, "0.2.0", is_release=True))


@pytest.mark.parametrize(
    ("expression", "is_good"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("Ask us", False),
        (UNKNOWN, False),
    ],
)
def test_permissive_licences(expression: str, *, is_good: bool) -> None:
    assert is_permissive(expression) is is_good


def facts(*fields: tuple[str, str]) -> metadata.PackageMetadata:
    message = Message()
    for key, value in (("Version", "1.0"), *fields):
        message[key] = value
    return cast("metadata.PackageMetadata", message)


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ([("License-Expression", "MIT OR Apache-2.0")], "MIT OR Apache-2.0"),
        ([("License", "BSD-3-Clause")], "BSD-3-Clause"),
        ([("License", "a long text"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT"),
        ([("Classifier", "License :: OSI Approved :: GNU General Public License v3 (GPLv3)")], UNKNOWN),
        (
            [("Classifier", f"License :: OSI Approved :: {name}") for name in ("MIT License", "GNU General (GPLv3)")],
            UNKNOWN,
        ),
        ([], UNKNOWN),
    ],
)
def test_the_licence_in_metadata(fields: list[tuple[str, str]], expression: str) -> None:
    assert expression_of(facts(*fields)) == expression


def test_an_exception_counts_for_its_licence_only() -> None:
    known = Package("certifi", facts(("License", "MPL-2.0")))
    changed = Package("certifi", facts(("License-Expression", "AGPL-3.0-only")))
    stranger = Package("stranger", None)
    problems = [licence.problem for licence in licences([known, changed, stranger])]
    assert problems == ["", "certifi 1.0: AGPL-3.0-only", "stranger (not installed): unknown"]
