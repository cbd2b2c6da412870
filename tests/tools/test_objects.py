"""Commands over a shared folder: inspect, verify, sweep and doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.diskwork import EVEN, MINE, OTHER, flip, make_ref, make_transfer

from kvstore.config import StoreConfig
from kvstore.model.chunks import Outcome
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.object.tier import ObjectTier
from kvstore.tools.doctor.remote import elsewhere

LAYOUT = replace(EVEN, element="bf16")
Run = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(params=["none", "lz4"])
def url(request: pytest.FixtureRequest, root: Path) -> str:
    """Return the URL of a folder with 20 chunks in each of two namespaces."""
    for namespace in (MINE, OTHER):
        setup = TierSetup(namespace, LAYOUT, UNBOUNDED_BYTES, {"url": f"file://{root}", "codec": request.param})
        tier = ObjectTier.open(setup)
        assert tier.put([make_transfer(make_ref(n), LAYOUT) for n in range(20)]) == [Outcome.STORED] * 20
        tier.close()
    return f"file://{root}"


def chunk_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def test_inspect(url: str, root: Path, run_json: Run) -> None:
    code, tree = run_json("inspect", url)
    assert (code, tree["kind"], len(tree["namespaces"])) == (0, "objects", 2)
    for found in tree["namespaces"]:
        assert (found["chunks"], found["tokens"], found["layers"]) == (20, 20 * 256, 4)
        assert found["fields"] in (dict(MINE.fields), dict(OTHER.fields))
    assert sum(found["file_bytes"] for found in tree["namespaces"]) == sum(p.stat().st_size for p in chunk_files(root))


def test_verify(url: str, root: Path, run: Run, run_json: Run) -> None:
    """Damaged objects are found, and --fix deletes them; what is no chunk is left alone."""
    assert run_json("verify", url)[1]["chunks"] == 40
    files = chunk_files(root)
    flip(files[0], 5000)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].write_bytes(b"")
    files[3].write_bytes(files[4].read_bytes())
    files[5].unlink()
    code, report = run_json("verify", url)
    assert (code, report["chunks"], len(report["faults"]), report["fixed"]) == (1, 39, 4, 0)
    code, report = run_json("verify", url, "--fix")
    assert (code, report["fixed"]) == (1, 4)
    assert run_json("verify", url)[1]["chunks"] == 35
    assert run("verify", url).exit_code == 0


def test_sweep(url: str, root: Path, run: Run, run_json: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.tiers.object import sweep

    monkeypatch.setattr(sweep, "GRACE_S", 0.0)
    size_bytes = sum(path.stat().st_size for path in chunk_files(root))
    half = str(size_bytes / 2 / (1 << 30))
    code, report = run_json("sweep", url, "--max-size", half, "--dry-run")
    assert (code, report["chunks"], report["is_dry"]) == (0, 40, True)
    assert report["removed_chunks"] >= 20
    assert len(chunk_files(root)) == 40
    code, report = run_json("sweep", url, "--max-size", half)
    assert code == 0
    assert len(chunk_files(root)) == 40 - report["removed_chunks"]
    assert "0 removed" in run("sweep", url, "--max-size", half, "--max-age", "1").stdout
    assert run("sweep", "redis://127.0.0.1:1").exit_code == 2
    (root / "sweep.lock").write_text('{"until_s": 1e12}')
    assert run("sweep", url).exit_code == 2


def test_doctor(tmp_path: Path) -> None:
    config = StoreConfig(remote_url=f"file://{tmp_path}/kv")
    (found,) = elsewhere(config)
    assert (found.topic, found.state) == ("objects", "ok")
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    (found,) = elsewhere(StoreConfig(remote_url=f"file://{tmp_path}/no/such/kv"))
    assert (found.state, "mounted" in found.found) == ("warning", True)
    (found,) = elsewhere(StoreConfig(remote_url=f"file://{tmp_path}/no/such/kv", remote_required=True))
    assert found.state == "error"
    (found,) = elsewhere(StoreConfig(remote_url="s3://bucket?wrong=1"))
    assert found.state == "error"
