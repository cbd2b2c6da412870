"""Contents of the wheel and the source distribution."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"),
    *("adapters", "config", "docs", "kvstore", "tests", "tools"),
)


def run_build(source: Path, output: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), *flags, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources, links included, without build products."""
    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("wheel")
    run_build(checkout, output, "--wheel")
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_of_sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of ``build`` without a flag, which makes the sdist, unpacks it and builds from that."""
    output = tmp_path_factory.mktemp("sdist")
    run_build(checkout, output)
    assert len(list(output.glob("*.tar.gz"))) == 1
    (built,) = output.glob("*.whl")
    return built


def contents(wheel: Path) -> dict[str, int]:
    """Return the names in a wheel and their checksums, without RECORD, whose order may differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if not info.filename.endswith("/RECORD")}


def test_only_kvstore_at_top_level(wheel: Path) -> None:
    assert wheel.name.startswith("vllm_kvstore-")
    top = {name.split("/")[0] for name in contents(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kvstore"}
    assert len(top) == 2


def test_every_module_is_in_it(wheel: Path, checkout: Path) -> None:
    expected = {
        *("kvstore/py.typed", "kvstore/model/keys.py", "kvstore/tiers/base.py", "kvstore/tools/cli.py"),
        *("kvstore/config/__init__.py", "kvstore/adapters/vllm/__init__.py"),
        *(f"kvstore/config/examples/{path.name}" for path in (checkout / "config" / "examples").glob("*.yaml")),
    }
    for folder in ("kvstore", "adapters", "config", "tools"):
        for package in (path.parent for path in (checkout / folder).rglob("__init__.py")):
            inside = package.relative_to(checkout)
            prefix = inside if folder == "kvstore" else Path("kvstore") / inside
            expected |= {str(prefix / path.name) for path in package.glob("*.py")}
    expected.add("kvstore/tools/serve/status.html")
    assert sum("examples" in name for name in expected) >= 2
    assert not expected - contents(wheel).keys()


def test_nothing_else_is_in_it(wheel: Path) -> None:
    names = [name for name in contents(wheel) if ".dist-info/" not in name]
    assert not [name for name in names if not name.endswith((".py", ".yaml", "/py.typed", "/status.html"))]
    assert not [name for name in names if "/dev/" in name or "test_" in name]


def test_entry_points_and_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        by_end = {name.rsplit(".dist-info/")[-1]: name for name in archive.namelist()}
        text = archive.read(by_end["entry_points.txt"]).decode()
        metadata = archive.read(by_end["METADATA"]).decode()
    entries = configparser.ConfigParser()
    entries.read_string(text)
    assert entries["console_scripts"]["kvstore"] == "kvstore.tools.cli:main"
    assert entries["vllm.general_plugins"]["kvstore"] == "kvstore.adapters.vllm.plugin:register"
    assert "License-Expression: Apache-2.0" in metadata
    assert "licenses/LICENSE" in by_end


def test_a_wheel_from_the_source_distribution_is_the_same(wheel: Path, wheel_of_sdist: Path) -> None:
    assert contents(wheel_of_sdist) == contents(wheel)
