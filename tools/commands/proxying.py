"""Command ``kvstore proxy``, which serves one address in front of prefill and decode engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvstore.tools.console import FAILED, AsJson, errors, log_to_stderr, print_report
from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.options import Choice, Limits, ProxyOptions, Tls, read_key, read_keys


@dataclass(frozen=True)
class Engines:
    """Options of the engines behind the proxy."""

    prefill: Annotated[
        list[str] | None, typer.Option(help="Address of an engine that computes prompts; repeatable.")
    ] = None
    decode: Annotated[list[str] | None, typer.Option(help="Address of an engine that answers; repeatable.")] = None
    decode_kv: Annotated[
        list[str] | None,
        typer.Option(
            help="kvs://HOST:PORT where a decode engine receives KV; one for each --decode, in order. "
            "Where prefill has other ranks than decode: HOST:PORT,PORT,..."
        ),
    ] = None
    engines: Annotated[
        Path | None, typer.Option(help="YAML file that names the engines instead; read again when it changes.")
    ] = None
    choice: Annotated[
        Choice, typer.Option(help="The least loaded engine, or first the one that had the prompt's beginning.")
    ] = Choice.PREFIX
    first_token: Annotated[
        bool,
        typer.Option(
            "--first-token",
            help="Begin streams with the token that the prefill engine computed; not where the engines' generation "
            "config caps max_new_tokens or sets penalties.",
        ),
    ] = False
    retain: Annotated[
        bool,
        typer.Option(
            "--retain",
            help="Pass prompt_cache_retention, prompt_cache_options and cache_control to engines as kvstore.retain, "
            "which they must list in request_fields.",
        ),
    ] = False
    bidirectional: Annotated[
        bool, typer.Option("--bidirectional", help="Tell clients of streams where the KV of an answer is.")
    ] = False


@dataclass(frozen=True)
class Entrance:
    """Options of the proxy's address, and of the keys of clients and engines."""

    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with --api-key-file.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 8080
    api_key_file: Annotated[Path | None, typer.Option(help="File with the keys of clients, one a line.")] = None
    engine_api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key for the engines; by default they get the client's.")
    ] = None


def proxy(
    *,
    engines: Engines,
    entrance: Entrance,
    tls: Tls,
    limits: Limits,
    check: Annotated[bool, typer.Option("--check", help="Only check the options.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer as vLLM does, computing prompts on one engine and answers on another, until SIGTERM or SIGINT.

    Running answers may then end, for up to --drain-s; a second signal ends the proxy at once. Exits with 2 if the
    options cannot be used, and with 1 if an answer was cut off at the end.
    """
    log_to_stderr()
    options = ProxyOptions(
        prefill=tuple(engines.prefill or ()),
        decode=tuple(engines.decode or ()),
        receivers=tuple(map(Receiver.parse, engines.decode_kv or ())),
        engines_file=engines.engines,
        choice=engines.choice,
        first_token=engines.first_token,
        retain=engines.retain,
        bidirectional=engines.bidirectional,
        host=entrance.host,
        port=entrance.port,
        api_key_file=entrance.api_key_file,
        api_keys=() if entrance.api_key_file is None else read_keys(entrance.api_key_file),
        engine_api_key=None if entrance.engine_api_key_file is None else read_key(entrance.engine_api_key_file),
        **asdict(tls),
        **asdict(limits),
    )
    options.check()
    if check:
        _report(options, options.port, "checked", as_json=as_json)
        return
    from kvstore.tools.proxy.process import run_proxy  # noqa: PLC0415 - an extra

    if not run_proxy(options, lambda bound: _report(options, bound, "ready", as_json=as_json)):
        errors().print("running answers were cut off")
        raise typer.Exit(FAILED)


def _report(options: ProxyOptions, port: int, status: str, *, as_json: bool) -> None:
    shown_host = f"[{options.host}]" if ":" in options.host else options.host
    listing = options.listing()
    report = {
        "prefill": [engine.url for engine in listing.prefill],
        "decode": [engine.url for engine in listing.decode],
        "decode_kv": [str(engine.receiver) for engine in listing.decode if engine.receiver is not None],
        "url": f"{'http' if options.tls_cert is None else 'https'}://{shown_host}:{port}",
        "status": status,
    }
    print_report(report, as_json=as_json)
