"""Commands to a cache server: ``ping``, ``stats``, ``lookup``, ``explain``, ``pin``, ``pins``, ``unpin``, ``clear``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Column, Table

from kvstore.model.errors import ConfigError, InvalidCallError, KVStoreError
from kvstore.tools.console import FAILED, WRONG_USAGE, Answer, AsJson, give_up, printable

if TYPE_CHECKING:
    from kvstore.tiers.server.operator import Found, Operator

_MIB = 1 << 20
_COUNTED = ("found", "missing", "stored", "read", "evicted")
_REASONS = {
    "never_stored": "it was never stored, or so long ago that the server has forgotten",
    "evicted": "it was evicted: raise max_local_cpu_size, the disk's size, or the quota",
    "removed": "it was cleared, or replaced by a longer chunk",
    "lost": "its file was missing or damaged",
}


def connect(url: str, key_file: Path | None, server_key_file: Path | None, timeout_s: float) -> Operator:
    """Return a connection to a cache server.

    Raises:
        ConfigError: the URL, a key file or the installation cannot be used.
        TierError: the server does not answer.
    """
    from kvstore.tiers import load_tier  # noqa: PLC0415

    load_tier("server")  # its error names the package to install
    from kvstore.tiers.server.operator import Operator  # noqa: PLC0415 - an extra
    from kvstore.tiers.server.url import parse_server  # noqa: PLC0415

    keys = {"client_key_file": key_file, "server_key_file": server_key_file}
    return Operator(parse_server(url, {"timeout_s": timeout_s, **keys}))


@dataclass(frozen=True)
class Server:
    """Options of a cache server, and of the keys to connect with."""

    url: Annotated[
        str, typer.Option(help="URL of the server: kvs+ipc:///folder or kvs://host:port.", envvar="KVSTORE_REMOTE_URL")
    ]
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with your secret key, for a server on another host.", envvar="KVSTORE_REMOTE_KEY_FILE"),
    ] = None
    server_key_file: Annotated[
        Path | None, typer.Option(help="File with the server's public key.", envvar="KVSTORE_REMOTE_SERVER_KEY_FILE")
    ] = None

    @contextmanager
    def operator(self, timeout_s: float = 5.0) -> Iterator[Operator]:
        """Yield a connection, whose errors end the command, with exit code 1 if the server does not answer."""
        try:
            with closing(connect(self.url, self.key_file, self.server_key_file, timeout_s)) as operator:
                yield operator
        except KVStoreError as error:
            give_up(error, WRONG_USAGE if isinstance(error, ConfigError | InvalidCallError) else FAILED)


@dataclass(frozen=True)
class Prompt:
    """Options of a prompt, and of the namespaces to look into."""

    tokens: Annotated[
        Path | None, typer.Option(help="File with the prompt's token ids, as a JSON list.", exists=True)
    ] = None
    text: Annotated[Path | None, typer.Option(help="File with the prompt as text; needs --tokenizer.", exists=True)] = (
        None
    )
    tokenizer: Annotated[Path | None, typer.Option(help="The model's tokenizer.json.", exists=True)] = None
    salt: Annotated[str | None, typer.Option(help="cache_salt of the requests.")] = None
    model: Annotated[
        str, typer.Option(help="Only namespaces with this id, or with this text in their model's name.")
    ] = ""

    def find(self, operator: Operator) -> tuple[int, list[Found]]:
        """Return the prompt's length in tokens, and the part of it that each namespace of the server holds.

        Raises:
            ConfigError: the options do not give a prompt.
            TierError: the server does not answer.
        """
        from kvstore.model.keys import KeyExtras  # noqa: PLC0415

        ids = self._ids()
        return len(ids), operator.find(ids, KeyExtras(cache_salt=self.salt), self.model)

    def _ids(self) -> list[int]:
        if (self.tokens is None) == (self.text is None):
            raise ConfigError("give the prompt with --tokens, or with --text and --tokenizer")
        if self.tokens is not None:
            try:
                ids = json.loads(self.tokens.read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.tokens} is no JSON list of token ids: {error}") from error
            if not isinstance(ids, list) or not all(type(item) is int for item in ids):
                raise ConfigError(f"{self.tokens} is no JSON list of token ids")
            return ids
        if self.tokenizer is None:
            raise ConfigError("--text needs --tokenizer, the tokenizer.json of the model")
        from tokenizers import Tokenizer as Reader  # noqa: PLC0415 - an extra

        assert self.text is not None
        return list(Reader.from_file(str(self.tokenizer)).encode(self.text.read_text(encoding="utf-8")).ids)


def ping(server: Server, *, timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0.01)] = 2.0) -> Answer:
    """Ask whether a cache server answers, as a readiness probe does. Exits with 1 if it does not."""
    with server.operator(timeout) as operator:
        status = operator.ping()
    return Answer({"status": status}, [status], 0 if status == "ok" else FAILED)


def stats(server: Server, *, as_json: AsJson = False) -> None:
    """Show what a cache server holds and has done, for each tier and each namespace."""
    with server.operator() as operator:
        tree = operator.stats()
    if as_json:
        print(json.dumps(tree))
    else:
        Console().print(_tables(tree))


def lookup(server: Server, prompt: Prompt) -> Answer:
    """Show how much of a prompt the server holds. Exits with 1 if it holds nothing."""
    with server.operator() as operator:
        num_tokens, found = prompt.find(operator)
    tree = {"tokens": num_tokens, "found": {each.namespace_id: each.num_tokens for each in found}}
    text = [f"{each.namespace_id}: {each.num_tokens} of {num_tokens} tokens ({_model(each)})" for each in found]
    if any(each.num_tokens for each in found):
        return Answer(tree, text)
    return Answer(tree, text or [_why_none(prompt)], FAILED, ["kvstore explain says why"] if found else [])


def explain(server: Server, prompt: Prompt) -> Answer:
    """Show whether the server holds a prompt, and if not, why."""
    with server.operator() as operator:
        num_tokens, found = prompt.find(operator)
    reasons = {each.namespace_id: _reason(each, found) for each in found}
    tree = {"tokens": num_tokens, "reasons": reasons, "chunks": {each.namespace_id: each.chunks for each in found}}
    text = []
    for each in found:
        text.append(f"{each.namespace_id} ({_model(each)}): {each.num_tokens} of {num_tokens} tokens")
        text.append(f"  {reasons[each.namespace_id]}")
    return Answer(tree, text or [_why_none(prompt)])


def pin(
    server: Server,
    prompt: Prompt,
    *,
    seconds: Annotated[
        int | None, typer.Option("--for", help="Seconds to keep it; at most the server's pin_max_secs.", min=1)
    ] = None,
) -> Answer:
    """Keep from eviction what the server holds of a prompt, for a time or until it is unpinned or removed."""
    with server.operator() as operator:
        _, found = prompt.find(operator)
        changed = sum(operator.pin(each, is_wanted=True, seconds=seconds or 0) for each in found)
    return _changed("pinned", changed)


def pins(server: Server) -> Answer:
    """List what is pinned at a cache server: the chunks of each namespace, and for how long."""
    with server.operator() as operator:
        tree = operator.pins()
    text = []
    for each in tree["pins"]:
        size = f"{each['chunks']} chunks, {_mib(each['bytes'])} MiB"
        text.append(f"{each['namespace']}: {size}, for {each['ends_in_s']} s")
    if tree["left_out"]:
        text.append(f"and {tree['left_out']} more")
    return Answer(tree, text or ["nothing is pinned"])


def unpin(
    server: Server,
    prompt: Prompt,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Unpin everything, instead of a prompt.")] = False,
) -> Answer:
    """Let what was pinned of a prompt, or everything that was pinned, be evicted again."""
    with server.operator() as operator:
        if everything:
            changed = operator.unpin()
        else:
            _, found = prompt.find(operator)
            changed = sum(operator.pin(each, is_wanted=False) for each in found)
    return _changed("unpinned", changed)


def clear(
    server: Server,
    *,
    namespace: Annotated[str, typer.Option(help="Id of the namespace to clear, as kvstore stats shows it.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Clear all namespaces.")] = False,
) -> Answer:
    """Forget the chunks of a namespace, or of all namespaces."""
    with server.operator() as operator:
        if bool(namespace) == everything:
            raise ConfigError("give either --namespace or --all")
        if namespace and not _is_known(namespace, operator.stats()):
            raise ConfigError(f"there is no namespace {namespace!r}: kvstore stats lists them")
        forgotten = operator.clear(namespace)
    return Answer({"forgotten": forgotten}, [f"{forgotten} chunks forgotten"])


def _changed(done: str, changed: int) -> Answer:
    return Answer({done: changed}, [f"{changed} chunks {done}"], 0 if changed else FAILED)


def _why_none(prompt: Prompt) -> str:
    """Return the reason why there is no namespace to look into."""
    if prompt.model:
        return f"there is no namespace with {prompt.model!r} in its id or model: kvstore stats lists them"
    return "the server is empty: it holds no chunks, and no engine is connected to it"


def _model(each: Found) -> str:
    return str(each.fields.get("model", ""))


def _is_known(namespace: str, tree: dict[str, Any]) -> bool:
    """Tell if a namespace is on the server, or may be among those that its report leaves out."""
    return bool(tree["namespaces_left_out"]) or namespace in {space["id"] for space in tree["namespaces"]}


def _reason(each: Found, others: list[Found]) -> str:
    """Explain why a prompt's match ends in a namespace, and name a namespace with a longer match."""
    longest = max(others, key=lambda other: other.num_tokens)
    last = each.chunks[-1] if each.chunks else ""
    if not each.chunks:
        text = "it is shorter than a chunk, and no block of it was stored"
    elif last.startswith(("memory", "disk")):
        text = f"all of it that can be stored is there: the last chunk in {last}"
    else:
        text = f"chunk {len(each.chunks) - 1} is missing: {_REASONS.get(last, last)}"
    if longest.num_tokens > each.num_tokens:
        names = each.fields.keys() | longest.fields.keys()
        differing = sorted(name for name in names if each.fields.get(name) != longest.fields.get(name))
        text += f"; {longest.namespace_id}, which differs in {', '.join(differing) or 'geometry'}, has more of it"
    return text


def _tables(tree: dict[str, Any]) -> Group:
    """Return the state of a server as tables of at most 80 columns."""
    title = f"kvstore {tree['version']}, {tree['status']}"
    if "tiers" in tree:
        title += f", up {tree['uptime_s']:.0f} s, {tree['clients']} clients"
    tiers = Table("tier", *_figures("used MiB", "of MiB", "chunks"), title=title, title_justify="left")
    for name, tier in tree.get("tiers", {}).items():
        tiers.add_row(name, _mib(tier["used_bytes"]), _mib(tier["capacity_bytes"]), f"{tier['chunks']:,}")
    if "tiers" not in tree:
        tiers.caption = "this client may see no more: that needs the right operate, without a tenant"
    model = Column("model", overflow="ellipsis")  # the only column that shrinks on a narrow terminal
    ids = [Column("namespace", no_wrap=True) for _ in range(2)]
    held = Table(ids[0], model, *_figures("clients", "chunks", "MiB", "quota MiB"))
    done = Table(ids[1], *_figures(*_COUNTED), caption="chunks; found and missing: of those looked up")
    for space in tree["namespaces"]:
        quota = "" if space["quota_bytes"] is None else _mib(space["quota_bytes"])
        sizes = f"{space['clients']:,}", f"{space['chunks']:,}", _mib(space["used_bytes"]), quota
        held.add_row(space["id"], escape(printable(str(space["fields"].get("model", "")))), *sizes)
        done.add_row(space["id"], *(_count(space["counters"][f"{name}_chunks"]) for name in _COUNTED))
    left_out = tree["namespaces_left_out"]
    held.caption = f"and {left_out:,} namespaces more, which hold less" if left_out else None
    return Group(tiers, held, done) if tree["namespaces"] else Group(tiers)


def _figures(*titles: str) -> list[Column]:
    return [Column(title, justify="right", no_wrap=True) for title in titles]


def _count(number: int) -> str:
    """Format a number in at most 8 characters."""
    for unit in ("", " k", " M", " G"):
        if number < 100_000:
            return f"{number:,}{unit}"
        number //= 1000
    return f"{number:,} T"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f}"
