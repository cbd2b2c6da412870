"""``kvstore ping``, ``stats``, ``lookup``, ``explain``, ``pin``, ``pins``, ``unpin``, ``clear``, at a cache server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kvstore.errors import ConfigError, InvalidCallError, KVStoreError
from kvstore.tiers import load_tier
from kvstore.tools.console import FAILED, WRONG_USAGE, AsJson, errors

if TYPE_CHECKING:
    from kvstore.keys import KeyExtras
    from kvstore.tiers.server.operator import Found, Operator

_MIB = 1 << 20
_REASONS = {
    "never_stored": "it was never stored, or so long ago that nobody remembers",
    "evicted": "it made room for others: raise max_local_cpu_size, the disk's size, or the quota",
    "removed": "it was cleared, or replaced by a longer chunk",
    "lost": "its file was missing or damaged",
}

Url = Annotated[
    str, typer.Option(help="Of the server: kvs+ipc:///folder or kvs://host:port.", envvar="KVSTORE_REMOTE_URL")
]
KeyFile = Annotated[
    Path | None, typer.Option(help="Own secret key, for another host.", envvar="KVSTORE_REMOTE_KEY_FILE")
]
ServerKeyFile = Annotated[
    Path | None, typer.Option(help="The server's public key.", envvar="KVSTORE_REMOTE_SERVER_KEY_FILE")
]
TokensFile = Annotated[Path | None, typer.Option("--tokens", help="JSON list of the prompt's token ids.", exists=True)]
TextFile = Annotated[Path | None, typer.Option("--text", help="The prompt as text; needs --tokenizer.", exists=True)]
Tokenizer = Annotated[Path | None, typer.Option(help="tokenizer.json of the model.", exists=True)]
Salt = Annotated[str | None, typer.Option(help="The requests' cache_salt.")]
Model = Annotated[str, typer.Option(help="Only namespaces whose model has this in its name, or with this id.")]


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command(epilog="Example: kvstore ping --url kvs+ipc:///run/kvstore")(ping)
    app.command(epilog="Example: kvstore stats --url kvs+ipc:///run/kvstore --watch")(stats)
    app.command(epilog="Example: kvstore lookup --url kvs+ipc:///run/kvstore --tokens prompt.json")(lookup)
    app.command(epilog="Example: kvstore explain --url kvs+ipc:///run/kvstore --tokens prompt.json")(explain)
    app.command(epilog="Example: kvstore pin --url kvs+ipc:///run/kvstore --tokens system-prompt.json")(pin)
    app.command(epilog="Example: kvstore pins --url kvs+ipc:///run/kvstore")(pins)
    app.command(epilog="Example: kvstore unpin --url kvs+ipc:///run/kvstore --tokens system-prompt.json")(unpin)
    app.command(epilog="Example: kvstore clear --url kvs+ipc:///run/kvstore --all")(clear)


@contextmanager
def asking(
    url: str, *, timeout_s: float = 5.0, key_file: Path | None = None, server_key_file: Path | None = None
) -> Iterator[Operator]:
    """A connection to a server; what goes wrong is told, and ends the command."""
    try:
        load_tier("server")  # says what to install, if need be
        from kvstore.tiers.server.operator import Operator  # noqa: PLC0415 - an extra
        from kvstore.tiers.server.url import parse_server  # noqa: PLC0415

        keys = {"client_key_file": key_file, "server_key_file": server_key_file}
        operator = Operator(parse_server(url, {"timeout_s": timeout_s, **keys}))
        try:
            yield operator
        finally:
            operator.close()
    except (KVStoreError, ImportError) as error:
        errors().print(f"error: {error}")
        is_usage = isinstance(error, ConfigError | InvalidCallError | ImportError)
        raise typer.Exit(WRONG_USAGE if is_usage else FAILED) from error


def ping(
    url: Url,
    *,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0.01)] = 2.0,
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Ask whether a cache server answers: a readiness probe. Exits with 1 if not."""
    with asking(url, timeout_s=timeout, key_file=key_file, server_key_file=server_key_file) as operator:
        status = operator.ping()
    print(json.dumps({"status": status}) if as_json else status)
    if status != "ok":
        raise typer.Exit(FAILED)


def stats(
    url: Url,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Show what a cache server holds and did: each tier, and each namespace."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        if as_json:
            print(json.dumps(operator.stats()))
        elif not watch:
            Console().print(_tables(operator.stats()))
        else:
            with Live(_tables(operator.stats()), auto_refresh=False) as live:
                try:
                    while True:
                        time.sleep(1.0)
                        live.update(_tables(operator.stats()), refresh=True)
                except KeyboardInterrupt:
                    return


def lookup(
    url: Url,
    *,
    tokens: TokensFile = None,
    text: TextFile = None,
    tokenizer: Tokenizer = None,
    salt: Salt = None,
    model: Model = "",
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Say how much of a prompt is at the server. Exits with 1 if nothing of it is."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        ids = _tokens(tokens, text, tokenizer)
        found = operator.find(ids, _extras(salt), model)
    best = max((each.num_tokens for each in found), default=0)
    if as_json:
        print(json.dumps({"tokens": len(ids), "found": {each.space_id: each.num_tokens for each in found}}))
    else:
        for each in found:
            print(f"{each.space_id}: {each.num_tokens} of {len(ids)} tokens ({each.fields.get('model', '')})")
    if not best:
        raise typer.Exit(FAILED)


def explain(
    url: Url,
    *,
    tokens: TokensFile = None,
    text: TextFile = None,
    tokenizer: Tokenizer = None,
    salt: Salt = None,
    model: Model = "",
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Say whether a prompt is at the server, and if not, why."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        ids = _tokens(tokens, text, tokenizer)
        found = operator.find(ids, _extras(salt), model)
    reasons = {each.space_id: _reason(each, found) for each in found}
    if as_json:
        chunks = {each.space_id: each.chunks for each in found}
        print(json.dumps({"tokens": len(ids), "reasons": reasons, "chunks": chunks}))
        return
    if not found:
        print("there is no such namespace: no engine with this model has said hello since the server was started")
    for each in found:
        print(f"{each.space_id} ({each.fields.get('model', '')}): {each.num_tokens} of {len(ids)} tokens")
        print(f"  {reasons[each.space_id]}")


def pin(
    url: Url,
    *,
    tokens: TokensFile = None,
    text: TextFile = None,
    tokenizer: Tokenizer = None,
    salt: Salt = None,
    model: Model = "",
    seconds: Annotated[
        int | None, typer.Option("--for", help="Seconds; at most pin_max_secs of the server.", min=1)
    ] = None,
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Keep what is at the server of a prompt from eviction, for a while, or until it is unpinned or removed."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        found = operator.find(_tokens(tokens, text, tokenizer), _extras(salt), model)
        changed = sum(operator.pin(each, is_wanted=True, seconds=seconds or 0) for each in found)
    _tell_pinned("pinned", changed, as_json=as_json)


def pins(
    url: Url,
    *,
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """List what is pinned at a cache server: how many chunks of each namespace, and for how long."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        tree = operator.pins()
    if as_json:
        print(json.dumps(tree))
        return
    for each in tree["pins"]:
        size = f"{each['chunks']} chunks, {_mib(each['bytes'])} MiB"
        print(f"{each['namespace']}: {size}, for {each['ends_in_s']} s")
    if tree["left_out"]:
        print(f"and {tree['left_out']} more")
    if not tree["pins"]:
        print("nothing is pinned")


def unpin(
    url: Url,
    *,
    tokens: TokensFile = None,
    text: TextFile = None,
    tokenizer: Tokenizer = None,
    salt: Salt = None,
    model: Model = "",
    everything: Annotated[bool, typer.Option("--all", help="All that is pinned, instead of a prompt.")] = False,
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Let what was pinned of a prompt, or all that was, go like everything else."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        if everything:
            changed = operator.unpin()
        else:
            found = operator.find(_tokens(tokens, text, tokenizer), _extras(salt), model)
            changed = sum(operator.pin(each, is_wanted=False) for each in found)
    _tell_pinned("unpinned", changed, as_json=as_json)


def clear(
    url: Url,
    *,
    namespace: Annotated[str, typer.Option(help="Id of the namespace, as kvstore stats shows it.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Of all namespaces.")] = False,
    as_json: AsJson = False,
    key_file: KeyFile = None,
    server_key_file: ServerKeyFile = None,
) -> None:
    """Forget the chunks of a namespace, or of all."""
    with asking(url, key_file=key_file, server_key_file=server_key_file) as operator:
        if bool(namespace) == everything:
            raise ConfigError("name either --namespace or --all")
        if namespace and not _is_known(namespace, operator.stats()):
            raise ConfigError(f"there is no namespace {namespace!r}: kvstore stats names them")
        forgotten = operator.clear(namespace)
    print(json.dumps({"forgotten": forgotten}) if as_json else f"{forgotten} chunks forgotten")


def _tell_pinned(done: str, changed: int, *, as_json: bool) -> None:
    print(json.dumps({done: changed}) if as_json else f"{changed} chunks {done}")
    if not changed:
        raise typer.Exit(FAILED)


def _is_known(namespace: str, tree: dict[str, Any]) -> bool:
    """Whether a namespace is at the server, as far as its report tells."""
    return bool(tree["namespaces_left_out"]) or namespace in {space["id"] for space in tree["namespaces"]}


def _tokens(tokens: Path | None, text: Path | None, tokenizer: Path | None) -> list[int]:
    """The ids that the options stand for.

    Raises:
        ConfigError: they stand for none.
    """
    if (tokens is None) == (text is None):
        raise ConfigError("a prompt is given by --tokens, or by --text and --tokenizer")
    if tokens is not None:
        try:
            ids = json.loads(tokens.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{tokens} is no JSON list of token ids: {error}") from error
        if not isinstance(ids, list) or not all(type(item) is int for item in ids):
            raise ConfigError(f"{tokens} is no JSON list of token ids")
        return ids
    if tokenizer is None:
        raise ConfigError("--text needs --tokenizer, the tokenizer.json of the model")
    from tokenizers import Tokenizer as Reader  # noqa: PLC0415 - an extra

    assert text is not None
    return list(Reader.from_file(str(tokenizer)).encode(text.read_text(encoding="utf-8")).ids)


def _extras(salt: str | None) -> KeyExtras:
    from kvstore.keys import KeyExtras  # noqa: PLC0415

    return KeyExtras(cache_salt=salt)


def _reason(each: Found, others: list[Found]) -> str:
    """Why a prompt ends where it does in a namespace, in words."""
    longest = max(others, key=lambda other: other.num_tokens)
    last = each.chunks[-1] if each.chunks else ""
    if not each.chunks:
        text = "it is shorter than a chunk, and not one block of it was stored"
    elif last.startswith(("memory", "disk")):
        text = f"all of it that can be stored is there: the last chunk in {last}"
    else:
        text = f"chunk {len(each.chunks) - 1} is missing: {_REASONS.get(last, last)}"
    if longest.num_tokens > each.num_tokens:
        names = each.fields.keys() | longest.fields.keys()
        differing = sorted(name for name in names if each.fields.get(name) != longest.fields.get(name))
        text += f"; {longest.space_id}, which differs in {', '.join(differing) or 'geometry'}, has more of it"
    return text


def _tables(tree: dict[str, Any]) -> Group:
    """The state of a server as two tables."""
    title = f"kvstore {tree['version']}, {tree['status']}, up {tree['uptime_s']:.0f} s, {tree['clients']} clients"
    tiers = Table(title=title, title_justify="left")
    for name in ("tier", "used MiB", "of MiB", "chunks"):
        tiers.add_column(name, justify="left" if name == "tier" else "right")
    for name, tier in tree["tiers"].items():
        tiers.add_row(name, _mib(tier["used_bytes"]), _mib(tier["capacity_bytes"]), str(tier["chunks"]))
    spaces = Table(caption="found, missing: chunks looked up; MiB: of how many, if there is a quota")
    counted = ("found", "missing", "stored", "read", "evicted")
    for name in ("namespace", "clients", "chunks", "MiB", *counted):
        spaces.add_column(name, justify="left" if name == "namespace" else "right", no_wrap=name == "namespace")
    for space in tree["namespaces"]:
        quota = f" of {_mib(space['quota_bytes'])}" if space["quota_bytes"] is not None else ""
        row = [space["id"], space["clients"], space["chunks"], _mib(space["used_bytes"]) + quota]
        spaces.add_row(*map(str, [*row, *(space["counters"][f"{name}_chunks"] for name in counted)]))
    return Group(tiers, spaces)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f}"
