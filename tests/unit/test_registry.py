"""The registry of tiers: ours, those of other packages, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import example_tier

from kvstore.errors import ConfigError
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.packs import PackWriter, Shard
from kvstore.tiers import BUILT_IN, known_tiers, open_tier
from kvstore.tiers.base import TierSetup

LAYOUT = KVLayout(page_bytes=(1024, 1024), planes=1, block_tokens=16, chunk_tokens=64)


def make_setup(**options: object) -> TierSetup:
    return TierSetup(Namespace({"model": "mine"}), LAYOUT, 1 << 20, options)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(site: Path, name: str, entry: str, code: str | None = None) -> None:
    """Put an installed package there, with one entry point and perhaps a module of its name."""
    if code is not None:
        (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry)


def test_our_tiers_can_be_opened(tmp_path: Path) -> None:
    options: dict[str, dict[str, object]] = {
        "cpu": {},
        "disk": {"folder": tmp_path},
        "gpu": {"device": "cpu"},
        "pack": {"url": f"pack://{tmp_path}/empty.kvpack"},
        "redis": {"url": "redis://localhost"},
        "server": {"url": "kvs+ipc:///nowhere"},
    }
    with PackWriter(tmp_path / "empty.kvpack", [Shard(make_setup().namespace, LAYOUT)]) as pack:
        pack.finish()
    assert {entry.name for entry in BUILT_IN} == set(options)
    for name, own in options.items():
        tier = open_tier(name, make_setup(**own))
        assert tier.name == name
        tier.close()


def test_a_tier_of_another_package(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = (block for block in example_tier.blocks("tiers.md", "toml") if "kvstore.tiers" in block)
    section = entry.replace('[project.entry-points."kvstore.tiers"]', "[kvstore.tiers]").replace('"', "")
    install(site, example_tier.MODULE, section, example_tier.blocks("tiers.md", "python")[0])
    assert list(known_tiers()) == ["cpu", "disk", "gpu", "pack", "redis", "server", "sqlite"]
    tier = open_tier("sqlite", make_setup(folder=str(tmp_path)))
    monkeypatch.delitem(sys.modules, example_tier.MODULE)
    assert tier.name == "sqlite"
    tier.close()


@pytest.mark.parametrize(("name", "hint"), [("dsik", "did you mean 'disk'?"), ("tape", "known are cpu, disk, gpu")])
def test_unknown_tiers(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"no tier '{name}'") as caught:
        open_tier(name, make_setup())
    assert hint in str(caught.value)


def test_a_name_that_is_claimed_twice(site: Path) -> None:
    install(site, "greedy", "[kvstore.tiers]\ndisk = greedy:Tier\n")
    with pytest.raises(ConfigError, match=r"claimed by kvstore\.tiers\.disk:DiskTier\.open and greedy:Tier"):
        open_tier("disk", make_setup())
    open_tier("cpu", make_setup()).close()  # others are not harmed


@pytest.mark.parametrize("code", [None, "import no_such_module", "x = 1"])
def test_a_package_that_cannot_be_loaded(site: Path, code: str | None) -> None:
    install(site, "broken_tier", "[kvstore.tiers]\nbroken = broken_tier:Tier\n", code)
    with pytest.raises(ConfigError, match="'broken' cannot be loaded from broken_tier:Tier"):
        open_tier("broken", make_setup())
    sys.modules.pop("broken_tier", None)


@pytest.mark.parametrize("options", [{"size": 3}, {"folder": "x"}])
def test_options_that_a_tier_does_not_have(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"no option '{next(iter(options))}': it knows none"):
        open_tier("cpu", make_setup(**options))


def test_a_cpu_tier_too_small_for_a_chunk() -> None:
    with pytest.raises(ConfigError, match="do not hold one chunk"):
        open_tier("cpu", TierSetup(Namespace({}), LAYOUT, LAYOUT.slot_bytes - 1))


def test_asking_for_names_imports_no_tier() -> None:
    code = "import sys, kvstore.tiers as t; t.known_tiers(); print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_the_suite_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import kvstore.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"kvstore.testing needs {missing}: pip install 'vllm-kvstore[testing]'" in done.stderr
