"""``kvstore proxy``: one address in front of prefill and decode engines."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import KVStoreError
from kvstore.tools.console import FAILED, AsJson, errors, give_up
from kvstore.tools.proxy.options import ProxyOptions, Receiver, read_key


def proxy(
    *,
    prefill: Annotated[list[str], typer.Option(help="Address of an engine that computes prompts; repeatable.")],
    decode: Annotated[list[str], typer.Option(help="Address of an engine that answers; repeatable.")],
    decode_kv: Annotated[
        list[str] | None, typer.Option(help="kvs://HOST:PORT where it takes KV in; one for each --decode, in order.")
    ] = None,
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Tell clients of streams where an answer's KV is.")
    ] = False,
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with --api-key-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8080,
    api_key_file: Annotated[Path | None, typer.Option(help="Holds the key that clients must know.")] = None,
    engine_api_key_file: Annotated[
        Path | None, typer.Option(help="Holds the key that engines want; else they get the client's.")
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Of a request.")] = 32.0,
    max_requests: Annotated[int, typer.Option(min=1, help="At the same time.")] = 256,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Between two bytes of an answer.")] = 600.0,
    connect_timeout_s: Annotated[float, typer.Option(min=0.1, help="For a connection to an engine.")] = 5.0,
    prefill_timeout_s: Annotated[float, typer.Option(min=0.1, help="Then the decode engine computes.")] = 300.0,
    health_interval_s: Annotated[float, typer.Option(min=0.05, help="Between two looks at an engine.")] = 3.0,
    drain_s: Annotated[float, typer.Option(min=0, help="For answers under way at the end.")] = 30.0,
    check: Annotated[bool, typer.Option("--check", help="Only check the options.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer as vLLM does, with prompts computed on one engine and answers on another, until SIGTERM or SIGINT.

    Answers under way may then end, for as long as --drain-s; a second signal ends it at once. Exits with 2 if the
    options cannot be used, with 1 if an answer was cut off at the end.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        options = ProxyOptions(
            prefill=tuple(prefill),
            decode=tuple(decode),
            receivers=tuple(map(Receiver.parse, decode_kv or ())),
            bidirectional=bidirectional,
            host=host,
            port=port,
            api_key=None if api_key_file is None else read_key(api_key_file),
            engine_api_key=None if engine_api_key_file is None else read_key(engine_api_key_file),
            max_body_bytes=int(max_body_mb * (1 << 20)),
            max_requests=max_requests,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            prefill_timeout_s=prefill_timeout_s,
            health_interval_s=health_interval_s,
            drain_s=drain_s,
        )
        options.check()
        if check:
            _report(options, port, "checked", as_json=as_json)
            return
        from kvstore.tools.proxy.process import run_proxy  # noqa: PLC0415 - an extra

        is_complete = run_proxy(options, lambda bound: _report(options, bound, "ready", as_json=as_json))
    except KVStoreError as error:
        give_up(error)
    if not is_complete:
        errors().print("answers under way were cut off")
        raise typer.Exit(FAILED)


def _report(options: ProxyOptions, port: int, status: str, *, as_json: bool) -> None:
    shown_host = f"[{options.host}]" if ":" in options.host else options.host
    report = {
        "prefill": list(options.prefill),
        "decode": list(options.decode),
        "decode_kv": list(map(str, options.receivers)),
        "url": f"http://{shown_host}:{port}",
        "status": status,
    }
    if as_json:
        print(json.dumps(report), flush=True)
        return
    for name, value in report.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        if shown:
            print(f"{name.replace('_', ' ')}: {shown}", flush=True)
