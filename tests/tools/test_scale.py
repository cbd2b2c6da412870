"""The measurement of large indexes, in small: what it says was there was there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.tools.dev import scale

CHUNKS = 2000


def test_an_index_filled_by_requests() -> None:
    found = scale.measure_stored(CHUNKS, "LRU")
    assert (found["chunks"], found["found"]) == (CHUNKS, 1.0)
    assert found["evicted"] > 0
    assert found["bytes_per_chunk"] < found["peak_rss_bytes"]


@pytest.mark.parametrize("policy", ["LRU", "ADAPTIVE"])
def test_an_index_after_a_start(policy: str) -> None:
    found = scale.measure_adopted(CHUNKS, policy)
    assert (found["chunks"], found["found"]) == (CHUNKS, 1.0)


def test_a_start_over_a_folder(tmp_path: Path) -> None:
    found = scale.measure_folder(CHUNKS, "LRU", tmp_path)
    assert (found["chunks"], found["trails"]) == (CHUNKS, CHUNKS)


def test_the_command_measures_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["scale", "--chunks", str(CHUNKS), "--only", "adopted", "--policy", "LRU", "--json"]
    )
    assert scale.main() == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["policy"], tree["adopted"]["found"]) == ("LRU", 1.0)
    monkeypatch.setattr("sys.argv", ["scale", "--chunks", "100"])
    with pytest.raises(SystemExit):
        scale.main()
