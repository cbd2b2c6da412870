"""Key files: the choice of a key, rotation while it is in use, and refusals that never tell a secret."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from support.key_files import secret_of, write_keys

from kvstore.format.sealing import open_ring
from kvstore.format.sealing.keyring import KeyRing
from kvstore.model.errors import ConfigError
from kvstore.model.keys import KeyExtras


def tenant(salt: str | None = None, **tags: str) -> bytes:
    return KeyExtras(cache_salt=salt, tags=tuple(tags.items())).tenant()


def test_the_last_key_of_a_tenant_seals(tmp_path: Path) -> None:
    keys = KeyRing(write_keys(tmp_path / "keys", "old", "new", acme_1="acme", acme_2="acme", bolt="bolt"))
    assert keys.newest(b"").id == "new"
    assert keys.newest(tenant("acme")).id == "acme_2"
    assert keys.newest(tenant("bolt")).id == "bolt"
    assert keys.newest(tenant("unknown")).id == "new"
    old = keys.get("old")
    assert old is not None
    assert old.secret != keys.newest(b"").secret
    assert keys.get("acme") is None


def test_a_tenant_is_named_by_salt_and_tags_together(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"- {{id: all, key: {secret_of('all')}}}\n- {{id: a, key: {secret_of('a')}, tags: {{team: a, site: x}}}}\n"
    )
    path.chmod(0o600)
    keys = KeyRing(path)
    assert keys.newest(tenant(site="x", team="a")).id == "a"
    assert keys.newest(tenant(team="a")).id == "all"
    assert keys.newest(tenant("salt", site="x", team="a")).id == "all"
    assert tenant() == tenant("") == b""
    assert tenant("a") != tenant("b")
    assert KeyExtras(cache_salt="a", lora=("x", "y")).tenant() == tenant("a")


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_keys(tmp_path / "keys", "one")
    keys = KeyRing(path)
    write_keys(path, "one", "two")
    assert keys.newest(b"").id == "one"  # it is too early to look
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 31)
    assert keys.newest(b"").id == "two"
    assert keys.get("one") is not None


@pytest.mark.parametrize("fault", ["text", "rights", "gone"])
def test_a_file_that_broke_leaves_the_former_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    path = write_keys(tmp_path / "keys", "one")
    keys = KeyRing(path)
    now_s = time.monotonic()
    if fault == "text":
        path.write_text("- id: one\n  key: short\n")
    elif fault == "rights":
        write_keys(path, "two").chmod(0o644)
    else:
        path.unlink()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 31)
    with caplog.at_level(logging.WARNING):
        assert keys.newest(b"").id == "one"
    assert "the former keys stay in use" in caplog.text
    write_keys(path, "three")
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 62)
    assert keys.newest(b"").id == "three"


SECRET = secret_of("secret")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no list of keys"),
        (f"id: a\nkey: {SECRET}\n", "no list of keys"),
        (f"- id: a\n  key: '{SECRET}\n", "not plain YAML"),
        (f"- id: a b\n  key: {SECRET}\n", "0.id"),
        (f"- id: a\n  key: {SECRET}\n  salt: {SECRET}\n", "0.salt"),
        (f"- id: a\n  key: {SECRET[:-8]}\n", "is not 32 bytes"),
        (f"- id: a\n  key: {SECRET}!\n", "is not 32 bytes"),
        (f"- id: a\n  key: {SECRET}\n- id: a\n  key: {SECRET}\n", "two keys with the id 'a'"),
        (f"- id: a\n  key: {SECRET}\n  cache_salt: {SECRET}\n", "no key without cache_salt"),
        (f"- id: a\n  key: !!python/object:os.system {SECRET}\n", "not plain YAML"),
    ],
)
def test_a_wrong_file_is_refused_without_its_content(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as caught:
        KeyRing(path)
    assert str(path) in str(caught.value)
    assert SECRET[:12] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "one")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyRing(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(tmp_path / "missing")


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "encryption.md"
    _, _, example = page.read_text(encoding="utf-8").partition("# keys.yaml\n")
    path = tmp_path / "keys"
    path.write_text(example.partition("```")[0])
    path.chmod(0o600)
    keys = KeyRing(path)
    chosen = [keys.newest(tenant("acme")).id, keys.newest(tenant(tenant="bolt")).id, keys.newest(tenant("else")).id]
    assert chosen == ["acme-1", "bolt-1", "2026-11"]


def test_a_key_never_prints_its_secret(tmp_path: Path) -> None:
    key = KeyRing(write_keys(tmp_path / "keys", "one")).newest(b"")
    assert repr(key) == str(key) == "RingKey('one')"


def test_the_option_is_a_path(tmp_path: Path) -> None:
    assert open_ring(None) is None
    assert isinstance(open_ring(str(write_keys(tmp_path / "keys", "one"))), KeyRing)
    with pytest.raises(ConfigError, match="path of a file"):
        open_ring(3)
