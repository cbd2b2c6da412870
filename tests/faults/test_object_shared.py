"""Tests of a shared folder that two mount namespaces see under different names, as two hosts would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.diskwork import EVEN, MINE, get, make_ref, put

from kvstore.model.chunks import Outcome
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.object.tier import ObjectTier

SUPPORT = Path(__file__).resolve().parents[1]
THEIRS = [make_ref(number) for number in range(100, 140)]
OURS = [make_ref(number) for number in range(20)]
OTHER_HOST = """
import sys
from support.diskwork import EVEN, MINE, get, make_ref, put
from kvstore.model.chunks import Outcome
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.object.tier import ObjectTier
tier = ObjectTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": sys.argv[1]}))
assert [get(tier, make_ref(number)) for number in range(20)] == [Outcome.HIT] * 20
assert set(put(tier, *(make_ref(number) for number in range(100, 140)))) == {Outcome.STORED}
tier.remove([make_ref(0)])
tier.close()
"""


def open_folder(path: Path) -> ObjectTier:
    return ObjectTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": f"file://{path}"}))


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_two_mount_namespaces(tmp_path: Path) -> None:
    """Each finds what the other has stored and checks its bytes; what one removes, the other learns."""
    shared, mounted = tmp_path / "shared", tmp_path / "mounted"
    shared.mkdir()
    mounted.mkdir()
    tier = open_folder(shared / "kv")
    assert set(put(tier, *OURS)) == {Outcome.STORED}
    tier.close()
    script = f"mount --bind {shared} {mounted} && exec {sys.executable} -c '{OTHER_HOST}' file://{mounted}/kv"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], cwd=SUPPORT, capture_output=True, text=True, check=False
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("no mount namespace can be made here")
    assert done.returncode == 0, done.stderr
    assert not list(mounted.iterdir()), "nothing is mounted in this namespace"
    tier = open_folder(shared / "kv")
    assert [get(tier, ref) for ref in THEIRS] == [Outcome.HIT] * 40
    assert get(tier, OURS[0]) is Outcome.MISS
    assert get(tier, OURS[1]) is Outcome.HIT
    tier.close()
