"""Commands ``kvstore engine``, which give an engine orders through its admin endpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.model.errors import ConfigError, TierError
from kvstore.ops.access import read_token
from kvstore.ops.drains import drain_all, mark_of, workers_here
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
    workers: Annotated[
        bool, typer.Option("--workers", help="Drain this host's workers themselves, without the endpoint.")
    ] = False,
    engine: Annotated[str, typer.Option(help="Of which engine with --workers, as engine_id in vLLM's setting.")] = "",
    wait_s: Annotated[float, typer.Option(min=0, help="Longest wait for chunks that are being written.")] = 30.0,
) -> Answer:
    """Prepare the end of an engine: it turns other engines away, and writes what it has stored.

    It goes on answering its requests. Exits with 1 if chunks are left, or a worker here does not answer, and with 2 if
    the endpoint does not, or there is no worker.
    """
    token = read_token(token_file) if token_file is not None else None
    names = _workers_of(engine) if workers else []
    deadline_s = time.monotonic() + wait_s
    while True:
        tree = {"status": "closing", **drain_all(names)._asdict()} if workers else _ask(admin, "/drain", "POST", token)
        left, unreached, now_s = tree.get("unwritten"), tree.get("unreached"), time.monotonic()
        is_done = not left and not (workers and unreached)
        if is_done or now_s >= deadline_s:
            break
        time.sleep(min(_LOOK_S, deadline_s - now_s))
    is_unknown = f", and {unreached} workers do not say" if unreached else ""
    return Answer(tree, [f"{left:,} chunks are still to be written{is_unknown}"], exit_code=0 if is_done else 1)


def _workers_of(engine: str) -> list[str]:
    """Return the names for ``drain_all`` of this host's workers of an engine, given its id or mark; empty for any.

    Raises:
        ConfigError: there are several engines, or none of them has this mark.
        TierError: there is no worker.
    """
    found = workers_here()
    chosen = [worker for worker in found if not engine or worker.engine in {engine, mark_of(engine)}]
    # Anybody may listen under such a name. Who does not say whose it is decides nothing, but is waited for.
    marks = {worker.engine for worker in chosen if worker.process} or {worker.engine for worker in chosen}
    if len(marks) == 1:
        chosen = [worker for worker in chosen if worker.engine in marks]
        return [worker.name for worker in chosen]
    known = ", ".join(f"{worker.engine} (process {worker.process})" for worker in found)
    if found:
        raise ConfigError(f"--engine must name one of the engines whose workers run here: {known}")
    raise TierError("no workers with kvstore run here as this user: run it as theirs, in their container")


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
