"""Commands ``kvstore engine``, which give an engine orders through its admin endpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.model.errors import ConfigError, TierError
from kvstore.ops.access import read_token
from kvstore.tools.console import Answer

_TIMEOUT_S = 10.0
_LOOK_S = 0.5  # between two questions

Admin = Annotated[str, typer.Option(help="The admin endpoint of an engine on this machine.")]
_ADMIN = "http://127.0.0.1:6999"


def pins(*, admin: Admin = _ADMIN) -> Answer:
    """Show which prompts clients of an engine have pinned.

    The engine needs internal_api_server_enabled. Exits with 2 if it does not answer.
    """
    tree = _ask(admin, "/pins", "GET")
    found = tree.get("pins", [])
    lines = [f"{pin['name']}: {pin['chunks']:,} chunks, ends in {pin['ends_in_s']:,.0f} s" for pin in found]
    ignored = [] if tree.get("counts") else ["pins of requests are ignored: request_fields does not list pin"]
    return Answer(tree, [*lines, f"{len(found):,} pins", *ignored])


def unpin(*, admin: Admin = _ADMIN) -> Answer:
    """End all pins of an engine's clients.

    The engine needs internal_api_server_enabled. Exits with 2 if it does not answer.
    """
    tree = _ask(admin, "/unpin", "POST")
    return Answer(tree, [f"{tree['pins']:,} pins ended" if "pins" in tree else str(tree.get("status"))])


def drain(
    *,
    admin: Admin = _ADMIN,
    token_file: Annotated[Path | None, typer.Option(help="The file in internal_api_server_token_file.")] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="Longest wait for chunks that are being written.")] = 30.0,
) -> Answer:
    """Prepare the end of an engine: it turns other engines away, and writes what it has stored.

    It goes on answering its requests. Exits with 1 if chunks are left, and with 2 if it does not answer.
    """
    token = read_token(token_file) if token_file is not None else None
    deadline_s = time.monotonic() + wait_s
    while True:
        tree = _ask(admin, "/drain", "POST", token)
        left, now_s = tree.get("unwritten"), time.monotonic()
        if not left or now_s >= deadline_s:
            break
        time.sleep(min(_LOOK_S, deadline_s - now_s))
    is_unknown = f", and {tree['unreached']} workers do not say" if tree.get("unreached") else ""
    return Answer(tree, [f"{left:,} chunks are still to be written{is_unknown}"], exit_code=1 if left else 0)


def _ask(admin: str, path: str, method: str, token: str | None = None) -> dict[str, Any]:
    """Return the answer of the endpoint.

    Raises:
        ConfigError: the address is not one of an admin endpoint.
        TierError: no admin endpoint answers there.
    """
    if not admin.startswith("http://"):
        raise ConfigError(f"--admin is {admin!r}: it must be http://127.0.0.1:PORT")
    import urllib.request  # noqa: PLC0415 - takes longer than most commands
    from http.client import HTTPException  # noqa: PLC0415

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(admin.rstrip("/") + path, method=method)  # noqa: S310 - http
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            tree = json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        remedy = "set internal_api_server_enabled, and see vLLM's log for its port"
        raise TierError(f"no admin endpoint answers at {admin} ({error}): {remedy}") from error
    if not isinstance(tree, dict):
        raise TierError(f"what answers at {admin} is not an admin endpoint of kvstore")
    return tree
