"""Access to an HTTP server: from this machine, or with a token."""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.model.keyfile import require_private
from kvstore.ops.access import Access, read_token

TOKEN = "t" * 32
HERE = {"host": "localhost:1"}
ELSEWHERE = {"host": "cache:9464"}
WITH_IT = {"authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("address", "token", "headers", "is_open", "status"),
    [
        ("127.0.0.1", None, HERE, False, None),
        ("127.0.0.1", None, {**HERE, "origin": "http://evil"}, False, HTTPStatus.FORBIDDEN),
        ("127.0.0.1", None, {"host": "evil"}, True, HTTPStatus.FORBIDDEN),
        ("127.0.0.1", TOKEN, HERE, False, HTTPStatus.UNAUTHORIZED),
        ("127.0.0.1", TOKEN, HERE | WITH_IT, False, None),
        ("127.0.0.1", TOKEN, HERE, True, None),
        ("0.0.0.0", None, ELSEWHERE, True, None),
        ("0.0.0.0", None, HERE, False, HTTPStatus.FORBIDDEN),
        ("0.0.0.0", None, ELSEWHERE | WITH_IT, False, HTTPStatus.FORBIDDEN),
        ("0.0.0.0", TOKEN, ELSEWHERE, False, HTTPStatus.UNAUTHORIZED),
        ("0.0.0.0", TOKEN, ELSEWHERE | {"authorization": f"Bearer {TOKEN}x"}, False, HTTPStatus.UNAUTHORIZED),
        ("0.0.0.0", TOKEN, ELSEWHERE | {"authorization": TOKEN}, False, HTTPStatus.UNAUTHORIZED),
        ("0.0.0.0", TOKEN, ELSEWHERE | {"authorization": "Bearer \xe4"}, False, HTTPStatus.UNAUTHORIZED),
        ("0.0.0.0", TOKEN, ELSEWHERE | WITH_IT, False, None),
    ],
)
def test_who_may_send_a_request(
    address: str, token: str | None, headers: dict[str, str], is_open: bool, status: HTTPStatus | None
) -> None:
    refusal = Access(address, token, "name a file").refusal(headers, is_open=is_open)
    assert (refusal and refusal.status) == status


@pytest.mark.parametrize("content", ["", "short", "t" * 513, f"{TOKEN}\n{TOKEN}", f"{TOKEN[:8]} {TOKEN}", "ä" * 20])
def test_files_without_a_token(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="token"):
        read_token(path)


def test_a_token_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_token(path)
    path.chmod(0o400)
    assert read_token(path) == TOKEN


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own a file as root")
def test_the_group_may_read_a_secret_that_root_has_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    path.chmod(0o440)
    require_private(path)
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="can be read by others"):
            require_private(path)
    path.chmod(0o440)
    os.chown(path, 1000, 1000)
    with pytest.raises(ConfigError, match="can be read by others"):
        require_private(path)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_orders_that_not_every_program_of_this_machine_may_give(address: str) -> None:
    without, access = Access(address, None, "name a file"), Access(address, TOKEN, "name a file")
    refusal = without.refusal(HERE, needs_token=True)
    assert refusal is not None
    assert refusal.message == "this needs a token: name a file"
    assert access.refusal(HERE, needs_token=True) is not None
    assert access.refusal(HERE | WITH_IT, needs_token=True) is None
    assert access.refusal(HERE | {"authorization": f"bearer {TOKEN}"}, needs_token=True) is None
