"""The file of a client's key: the key, its rights and its tenant."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.protocol.keyfiles import EVERY_RIGHT, USUAL_RIGHTS, ListedKey, Right, make_keys, read_list, read_public


@pytest.fixture
def file(tmp_path: Path) -> Path:
    public, secret = make_keys(tmp_path, "engine")
    secret.unlink()
    return public


def add(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def test_a_key_alone_may_read_and_write(file: Path) -> None:
    assert read_list(file.parent) == {read_public(file): ListedKey("engine", USUAL_RIGHTS, "")}


def test_rights_and_tenant(file: Path) -> None:
    key = read_public(file)
    add(file, "\n# of the batch cluster\nrights: read,clear ,  operate\r\ntenant: team-a\n")
    assert read_list(file.parent) == {key: ListedKey("engine", EVERY_RIGHT & ~Right.WRITE, "team-a")}
    assert read_public(file) == key


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("rights: read, wirte", r":2: 'wirte' is not a right: choose from read, write, clear, operate"),
        ("rights:", r":2: '' is not a right"),
        ("\nright: read", r":3: 'right: read' is neither"),
        ("rights: read\nrights: write", r":3: rights appears twice"),
        ("tenant: a b", r":2: 'a b' is not a tenant's name"),
        ("tenant: *", r":2: '\*' is not a tenant's name"),
        ("tenant:", r":2: '' is not a tenant's name"),
        ("x" * 5000, "longer than 4096 bytes"),
    ],
)
def test_errors_name_the_file_and_the_line(file: Path, lines: str, message: str) -> None:
    add(file, lines)
    with pytest.raises(ConfigError, match=f"engine.pub.*{message}"):
        read_list(file.parent)


@pytest.mark.parametrize("text", ["short", "x" * 41, "rights: read"], ids=["short", "long", "no key"])
def test_a_file_without_a_key_lets_nobody_in(file: Path, text: str) -> None:
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match="does not begin with a key of 40 characters"):
        read_list(file.parent)


def test_a_key_is_listed_once(file: Path) -> None:
    file.with_name("other.pub").write_text(file.read_text() + "rights: read\n")
    with pytest.raises(ConfigError, match=r"other.pub holds the same key as engine.pub"):
        read_list(file.parent)
