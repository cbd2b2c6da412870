"""Any content of a file, a variable or the extra config gives a configuration or a ConfigError, and nothing else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvstore.config import load_config
from kvstore.config.lmcache import NOT_IMPLEMENTED
from kvstore.config.reference import KEYS
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.dates()
    | st.just(20_000).map(lambda bits: 2**bits)
    | st.sampled_from(["file://", "~", "5GB", "file:///%00", "//[", "file:////[x"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
NAMES = st.sampled_from([*KEYS, *sorted(NOT_IMPLEMENTED), "extra_config"]) | st.text() | st.integers()
REUSES_FILE = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kv.yaml"


def load_or_refuse(file: Path | None = None, extra: dict[str, object] | None = None, **environ: str) -> None:
    """Load a configuration. Only ConfigError may be raised, and a loaded configuration is usable."""
    with contextlib.suppress(ConfigError):
        config = load_config(extra, path=file, environ=environ, log_warnings=False).config
        assert config.max_local_cpu_bytes >= 0
        assert config.max_local_disk_bytes >= 0


@settings(suppress_health_check=REUSES_FILE)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_any_mapping_in_a_file(file: Path, values: dict[object, object]) -> None:
    try:
        text = yaml.safe_dump(values, allow_unicode=True)
    except ValueError:  # a number with more digits than Python writes
        return
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    load_or_refuse(file)


@settings(suppress_health_check=REUSES_FILE)
@given(st.binary() | st.text(alphabet="[]{}:-?&*!|>'\"%@`#,~<. \n\t0123456789abefnotx_").map(str.encode))
@example(b"? [a]\n: 1")
@example(b"? {a: 1}\n: 1")
@example(b"<<: {chunk_size: 1}")
@example(b"<<: 1")
@example(b"chunk_size: 0b_")
@example(b"!!set {a, b}")
@example(b"!!map [a]")
@example(b"chunk_size: !!int ''")
@example(b"chunk_size: !!timestamp x")
@example(b"chunk_size: !!binary aGFsbG8=")
@example(b"chunk_size: " + b"9" * 5000)
def test_any_bytes_in_a_file(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    load_or_refuse(file)


@given(NAMES.map(str), VALUES)
def test_any_extra_config(key: str, value: object) -> None:
    load_or_refuse(None, {f"kvstore.{key}": value})


@given(st.sampled_from([*KEYS, "remote_url", "extra_config", "nothing"]), st.text())
def test_any_variable(key: str, text: str) -> None:
    load_or_refuse(None, None, **{f"KVSTORE_{key.upper()}": text})
