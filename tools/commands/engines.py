"""``kvstore pins``: what clients of a running engine keep from eviction, through its admin endpoint."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from typing import Annotated, Any

import typer

from kvstore.errors import ConfigError, TierError
from kvstore.tools.console import AsJson, give_up

_TIMEOUT_S = 10.0


def pins(
    *,
    admin: Annotated[str, typer.Option(help="The admin endpoint of an engine on this machine.")] = (
        "http://127.0.0.1:6999"
    ),
    end: Annotated[bool, typer.Option("--end", help="End all of them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which prompts clients have pinned at an engine, or end all pins.

    Needs internal_api_server_enabled at the engine. Exits with 1 if nobody answers.
    """
    try:
        tree = _ask(admin, "/unpin", "POST") if end else _ask(admin, "/pins", "GET")
    except (ConfigError, TierError) as error:
        give_up(error)
    print(json.dumps(tree) if as_json else "\n".join(_ended(tree) if end else _listed(tree)))


def _ask(admin: str, path: str, method: str) -> dict[str, Any]:
    if not admin.startswith("http://"):
        raise ConfigError(f"--admin is {admin!r}: it must be http://127.0.0.1:PORT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        asked = urllib.request.Request(admin.rstrip("/") + path, method=method)  # noqa: S310 - http
        with opener.open(asked, timeout=_TIMEOUT_S) as answer:
            tree = json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        raise TierError(
            f"no admin endpoint answers at {admin} ({error}): set internal_api_server_enabled, and see vLLM's log for "
            "its port"
        ) from error
    if not isinstance(tree, dict):
        raise TierError(f"what answers at {admin} is no admin endpoint of kvstore")
    return tree


def _listed(tree: dict[str, Any]) -> list[str]:
    found = tree.get("pins", [])
    lines = [f"{pin['name']}: {pin['chunks']:,} chunks, ends in {pin['ends_in_s']:,.0f} s" for pin in found]
    ignored = [] if tree.get("counts") else ["pins of requests are ignored: request_fields does not list pin"]
    return [*lines, f"{len(found):,} pins", *ignored]


def _ended(tree: dict[str, Any]) -> list[str]:
    return [f"{tree['pins']:,} pins ended" if "pins" in tree else str(tree.get("status"))]
