"""A tier of another package, configured like the built-in ones, up to the workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.example_tier import install_example

from kvstore.adapters.vllm.glue.options import remote_options
from kvstore.config import load_config
from kvstore.engine.opening import open_remote
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.tiers.base import GIVEN_BY_URL

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(page_bytes=(1024, 1024), planes=1, block_tokens=16, chunk_tokens=64)


def test_a_worker_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the options that every remote tier has, and no others unless they are set."""
    site, folder, file = tmp_path / "site", tmp_path / "kv", tmp_path / "kvstore.yaml"
    site.mkdir()
    folder.mkdir()
    install_example(site)
    monkeypatch.syspath_prepend(str(site))
    file.write_text(f"remote_url: sqlite://{folder}\nremote_required: true\n")
    options = remote_options(load_config(path=file, environ={}).config)
    assert options is not None
    assert {*options.settings, "url"} == set(GIVEN_BY_URL)
    assert options.max_queue is None, "chunks are sent there"
    tier = open_remote(Namespace({"model": "mine"}), LAYOUT, options, 10.0)
    assert tier.name == "sqlite"
    tier.close()
    assert list(folder.glob("*.sqlite"))
