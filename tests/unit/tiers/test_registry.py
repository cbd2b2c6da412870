"""The registry of tiers: built-in ones, those of other packages, and the errors of missing ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import support
from pydantic import ValidationError
from support import example_tier
from support.example_tier import install, install_example

from kvstore.config import StoreConfig
from kvstore.format.pack import PackWriter, Shard
from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers import BUILT_IN, BUILT_IN_SCHEMES, known_schemes, known_tiers, leads_to, open_tier, tier_behind
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup

LAYOUT = KVLayout(page_bytes=(1024, 1024), planes=1, block_tokens=16, chunk_tokens=64)


def make_setup(**options: object) -> TierSetup:
    return TierSetup(Namespace({"model": "mine"}), LAYOUT, 1 << 20, options)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is searched for packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_our_tiers_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(support.__file__).parent / "fake_mooncake"))  # a platform may have no wheel
    options: dict[str, dict[str, object]] = {
        "disk": {"folder": tmp_path},
        "members": {"url": "kvs://127.0.0.1:1,127.0.0.1:2"},
        "mooncake": {"url": "mooncake://127.0.0.1:1"},
        "object": {"url": f"file://{tmp_path}/shared"},
        "pack": {"url": f"pack://{tmp_path}/empty.kvpack"},
        "redis": {"url": "redis://localhost"},
        "server": {"url": "kvs+ipc:///nowhere"},
    }
    with PackWriter(tmp_path / "empty.kvpack", [Shard(make_setup().namespace, LAYOUT)]) as pack:
        pack.finish()
    assert {entry.name for entry in BUILT_IN} == set(options)
    for name, own in options.items():
        setup = make_setup(**own)
        tier = open_tier(name, setup if name in {"disk", "pack"} else replace(setup, capacity_bytes=UNBOUNDED_BYTES))
        assert tier.name == name
        tier.close()


def test_a_tier_of_another_package(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example(site)
    assert list(known_tiers()) == ["disk", "members", "mooncake", "object", "pack", "redis", "server", "sqlite"]
    assert tier_behind("sqlite:///x") == "sqlite"
    tier = open_tier("sqlite", make_setup(url=f"sqlite://{tmp_path}"))
    monkeypatch.delitem(sys.modules, example_tier.MODULE)
    assert tier.name == "sqlite"
    tier.close()


_USE_BY_CONFIG = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from typer.testing import CliRunner
from kvstore import CacheEngine, EngineOptions, Namespace, RemoteOptions, bind_paged_kv
from kvstore.config import load_config
from kvstore.tools.cli import app

checked = CliRunner().invoke(app, ["config", "check", sys.argv[1]])
assert checked.exit_code == 0, checked.output
loaded = load_config(path=Path(sys.argv[1]), environ={})
assert not loaded.warnings, loaded.warnings
config = loaded.config
layers = {f"layer.{i}": torch.randn(64, 8, 16, 32) for i in range(4)}
paged = bind_paged_kv(layers, num_blocks=64, block_tokens=16, chunk_tokens=config.chunk_size)
tokens, slots = list(range(600)), torch.arange(600)
settings = {"connections": config.remote_connections, "timeout_s": config.blocking_timeout_secs}
options = EngineOptions(
    config.max_local_cpu_bytes, remote=RemoteOptions(config.shared_url, settings, required=config.remote_required)
)
before = {name: layer.clone() for name, layer in layers.items()}
for turn in range(2):  # the second engine finds only what the tier kept
    with CacheEngine(paged, Namespace({"model": "mine"}), options) as engine:
        print("found", engine.lookup(tokens))
        if turn:
            for layer in layers.values():
                layer.zero_()
            print("loaded", int(engine.retrieve(tokens, slot_mapping=slots).sum()))
        else:
            engine.store(tokens, slot_mapping=slots)
            assert engine.flush()
print("same", all(torch.equal(layers[name][:37], before[name][:37]) for name in layers))
"""


@pytest.mark.slow
def test_a_configuration_uses_a_tier_of_another_package(site: Path, tmp_path: Path) -> None:
    """It is used from the installed package to loaded KV, with only its URL in the file, in a separate process."""
    install_example(site)
    (page,) = (block for block in example_tier.blocks("tiers.md", "yaml") if "sqlite" in block)
    (tmp_path / "kv").mkdir()
    text = page.replace("/var/lib/kvstore", str(tmp_path / "kv")).replace("20.0", "0.05")
    (tmp_path / "kvstore.yaml").write_text(text + "remote_required: true\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _USE_BY_CONFIG, str(tmp_path / "kvstore.yaml")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["found 0", "found 592", "loaded 592", "same True"]


def test_a_scheme_means_what_the_registry_says(site: Path) -> None:
    """Built-in tiers are in it like others; a plugin may provide a scheme that only LMCache knows."""
    names = {entry.name: tier_behind(f"{entry.name}://x") for entry in BUILT_IN_SCHEMES}
    assert names == {
        **dict.fromkeys(("redis", "rediss", "unix", "redis-sentinel", "redis-cluster"), "redis"),
        **dict.fromkeys(("mooncake", "mooncakestore"), "mooncake"),
        **dict.fromkeys(("s3", "az", "gs", "file"), "object"),
        "pack": "pack",
        **dict.fromkeys(("kvs", "kvs+ipc"), "server"),
        **dict.fromkeys(("kvs+dns", "kvs+srv", "kvs+file"), "members"),
    }
    ignored = StoreConfig(remote_url="fs://bucket")
    assert ignored.shared_url is None
    install(
        site,
        "bucket",
        "[kvstore.tiers]\nbucket = bucket:Tier\n[kvstore.schemes]\nfs = bucket:Tier\neic = bucket:Tier\n",
    )
    assert [tier_behind(f"{scheme}://b") for scheme in ("fs", "eic")] == ["bucket", "bucket"]
    assert StoreConfig(remote_url="fs://bucket").shared_url == "fs://bucket"
    assert list(known_schemes())[-2:] == ["fs", "eic"]
    assert leads_to("eic://b", "bucket")
    assert not any(leads_to(url, "bucket") for url in (None, "", "/a/path", "eic", "kvs://b", "ftp://b"))
    with pytest.raises(ConfigError, match=r"begins with one of redis://.*eic://, not with 'ftp'"):
        tier_behind("ftp://b")


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            "[kvstore.schemes]\nkvs = greedy:Tier\n",
            "kvs:// is claimed by kvstore.tiers.server.tier:ServerTier.open and greedy",
        ),
        ("[kvstore.schemes]\ntape = greedy:Tier\n", "tape:// leads to greedy:Tier, which is no tier"),
    ],
)
def test_a_scheme_that_cannot_be_used(site: Path, sections: str, problem: str) -> None:
    install(site, "greedy", sections)
    url = f"{sections.split()[1]}://h"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        tier_behind(url)
    with pytest.raises(ValidationError, match=re.escape(problem)):
        StoreConfig(remote_url=url)
    assert StoreConfig(remote_url="redis://h").shared_url == "redis://h"  # others are not harmed


@pytest.mark.parametrize(
    ("name", "hint"), [("dsik", "did you mean 'disk'?"), ("tape", "known are disk, members, mooncake, object")]
)
def test_unknown_tiers(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"no tier '{name}'") as caught:
        open_tier(name, make_setup())
    assert hint in str(caught.value)


def test_a_name_that_is_claimed_twice(site: Path) -> None:
    install(site, "greedy", "[kvstore.tiers]\ndisk = greedy:Tier\n")
    with pytest.raises(ConfigError, match=r"claimed by kvstore\.tiers\.disk\.tier:DiskTier\.open and greedy:Tier"):
        open_tier("disk", make_setup())
    open_tier("redis", replace(make_setup(url="redis://h"), capacity_bytes=UNBOUNDED_BYTES)).close()  # not harmed


@pytest.mark.parametrize("code", [None, "import no_such_module", "x = 1"])
def test_a_package_that_cannot_be_loaded(site: Path, code: str | None) -> None:
    install(site, "broken_tier", "[kvstore.tiers]\nbroken = broken_tier:Tier\n", code)
    with pytest.raises(ConfigError, match="'broken' cannot be loaded from broken_tier:Tier"):
        open_tier("broken", make_setup())
    sys.modules.pop("broken_tier", None)


@pytest.mark.parametrize("options", [{"size": 3}, {"url": "x"}])
def test_options_that_a_tier_does_not_have(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no option '{next(iter(options))}': it knows folder"):
        open_tier("disk", make_setup(folder=tmp_path, **options))
    with pytest.raises(ConfigError, match=f"no option '{next(iter(options))}': it knows none"):
        make_setup(**options).require_known_options()


def test_asking_for_names_imports_no_tier() -> None:
    code = "import sys, kvstore.tiers as t; t.known_tiers(); print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_the_suite_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import kvstore.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"kvstore.testing needs {missing}: pip install 'vllm-kvstore[testing]'" in done.stderr
