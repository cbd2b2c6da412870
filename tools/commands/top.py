"""Command ``kvstore top``: live numbers of a cache server, an engine, or whatever has a ``/metrics`` page of ours."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from kvstore.model.errors import ConfigError, InvalidCallError, KVStoreError, TierError
from kvstore.tools.commands.cache_server import connect
from kvstore.tools.console import FAILED, WRONG_USAGE, AsJson, give_up, numbers, printable, size
from kvstore.tools.live import Course, Sample, figures, kind_of
from kvstore.tools.processes import handled

if TYPE_CHECKING:
    import httpx

    from kvstore.tiers.server.operator import Operator

_TIMEOUT_S: Final = 5.0
_MAX_PAGE_BYTES: Final = 32 << 20
_MAX_NAME: Final = 40  # letters of names that others chose
_MAX_ROOM: Final = 32  # of the names of tiers and quotas: a tenant and a salt
_MAX_QUOTAS: Final = 10
_MAX_LINE: Final = 400
_BAR_WIDTH: Final = 30
_FIGURE_WIDTH: Final = 10  # so that columns keep their places
_BREAKER: Final = {0.0: "in use", 1.0: "being tried", 2.0: "LEFT OUT"}


class _Source(Protocol):
    """Origin of samples. A sample raises ``TierError`` while there is no answer."""

    def sample(self) -> Sample: ...

    def close(self) -> None: ...


class _ServerSource:
    """A cache server, asked over the protocol for operators. It connects anew after each failure."""

    def __init__(self, connects: Callable[[], Operator]) -> None:
        self._connects = connects
        self._operator: Operator | None = None

    def sample(self) -> Sample:
        try:
            if self._operator is None:
                self._operator = self._connects()
            asked_s = time.monotonic()
            tree = self._operator.stats()
            return Sample.of_stats(asked_s, time.monotonic(), tree)
        except (TierError, LookupError, TypeError, AttributeError) as error:
            self.close()
            if isinstance(error, TierError):
                raise
            raise TierError("the cache server's report cannot be read: it may be of another version") from error

    def close(self) -> None:
        operator, self._operator = self._operator, None
        if operator is not None:
            operator.close()


class _PageSource:
    """A ``/metrics`` page."""

    def __init__(self, url: str) -> None:
        try:
            import httpx  # noqa: PLC0415 - an extra
            import prometheus_client  # noqa: F401, PLC0415 - the same

            from kvstore.tools.vllmclient import client_of  # noqa: PLC0415
        except ImportError as error:
            raise ImportError(f"top needs {error.name} for a page: pip install 'vllm-kvstore[warm]'") from error
        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url!r} is no address of a page: {error}") from error
        if not address.host:
            raise ConfigError(f"{url!r} is no address of a page: it must be http://HOST:PORT/metrics")
        self._url = str(address if address.path.strip("/") else address.copy_with(path="/metrics"))
        self._client: httpx.Client = client_of("", _TIMEOUT_S)

    def sample(self) -> Sample:
        import httpx  # noqa: PLC0415
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

        try:
            text = self._read()
            families = list(text_string_to_metric_families(text))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise TierError(f"{self._url} gives no metrics: {str(error) or type(error).__name__}") from error
        samples = ((each.name, each.labels, each.value) for family in families for each in family.samples)
        return Sample.of_page(time.monotonic(), samples)

    def _read(self) -> str:
        """Return the page, of which length and time are bounded."""
        deadline_s, page = time.monotonic() + _TIMEOUT_S, bytearray()
        with self._client.stream("GET", self._url) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                page += part
                if len(page) > _MAX_PAGE_BYTES:
                    raise ValueError(f"it has more than {_MAX_PAGE_BYTES >> 20} MiB")
                if time.monotonic() > deadline_s:
                    raise ValueError(f"it takes more than {_TIMEOUT_S:.0f} s")
        return page.decode(errors="replace")

    def close(self) -> None:
        self._client.close()


def top(
    target: Annotated[
        str, typer.Argument(help="A cache server's URL, kvs+ipc:// or kvs://, or a page, http://HOST:PORT/metrics.")
    ] = "",
    *,
    url: Annotated[
        str, typer.Option(help="The same, as other commands take a cache server's URL.", envvar="KVSTORE_REMOTE_URL")
    ] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with your secret key, for a server on another host.", envvar="KVSTORE_REMOTE_KEY_FILE"),
    ] = None,
    server_key_file: Annotated[
        Path | None, typer.Option(help="File with the server's public key.", envvar="KVSTORE_REMOTE_SERVER_KEY_FILE")
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two samples.", min=0.1, max=3600.0)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one sample, which has no rates, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show live what a cache server, an engine or a proxy does, until Ctrl-C; with --json one line for each sample.

    Exits with 1 if there is no answer at first, and with 0 after Ctrl-C. Later gaps and restarts are shown.
    """
    name = target or url
    try:
        source = _open(name, key_file, server_key_file)
    except (KVStoreError, ImportError) as error:
        give_up(error, WRONG_USAGE)
    with ExitStack() as stack:
        stack.callback(source.close)
        course = Course()
        try:
            course.add(_known(source.sample(), name))
        except KVStoreError as error:
            give_up(error, WRONG_USAGE if isinstance(error, ConfigError | InvalidCallError) else FAILED)
        # Also where a shell had SIGINT ignored; and the terminal is as it was before.
        stack.enter_context(handled((signal.SIGINT, signal.SIGTERM), _interrupt))
        try:
            show = stack.enter_context(_display(name, as_json=as_json, is_live=not once))
            show(course)
            while not once:
                time.sleep(every)
                _advance(course, source)
                show(course)
        except KeyboardInterrupt:
            return


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _open(name: str, key_file: Path | None, server_key_file: Path | None) -> _Source:
    if not name:
        raise ConfigError(
            "name a cache server (kvs+ipc:///folder, kvs://host:port) or a page (http://host:port/metrics)"
        )
    if name.startswith(("http://", "https://")):
        return _PageSource(name)
    return _ServerSource(lambda: connect(name, key_file, server_key_file, _TIMEOUT_S))


def _known(sample: Sample, name: str) -> Sample:
    if kind_of(sample) is None:
        raise ConfigError(f"{name} has no metrics of kvstore: name an engine with kvstore, a cache server or a proxy")
    return sample


def _advance(course: Course, source: _Source) -> None:
    try:
        course.add(source.sample())
    except TierError as error:
        course.miss(time.monotonic(), str(error))


def _display(name: str, *, as_json: bool, is_live: bool) -> AbstractContextManager[Callable[[Course], None]]:
    """Return a context in which each state of the course is shown."""
    if as_json:
        return nullcontext(lambda course: print(json.dumps(_line(course)), flush=True))
    console = Console()
    if not (is_live and console.is_terminal):
        return nullcontext(lambda course: console.print(_view(course, name)))
    return _Screen(console, name)


class _Screen:
    """Context manager for the terminal's other screen, as a full-screen program uses it."""

    def __init__(self, console: Console, name: str) -> None:
        self._name = name
        self._live = Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop")

    def __enter__(self) -> Callable[[Course], None]:
        self._live.__enter__()
        return lambda course: self._live.update(_view(course, self._name), refresh=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def _line(course: Course) -> dict[str, Any]:
    state = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "error": course.error,
        "gap_s": round(course.gap_s, 3),
        "restarts": course.restarts,
    }
    return {**state, **figures(course)}


def _view(course: Course, name: str) -> Group:
    """Return the table of at most 80 columns, the most wanted on top: a small terminal cuts the end."""
    tree = figures(course)
    parts: list[RenderableType] = [_title(tree, name), *_troubles(course)]
    if tree:
        parts += [_states(tree), _rates(tree), _flows(tree), *_rooms(tree), *_failures(tree), *_spaces(tree)]
    return Group(*parts)


def _title(tree: Mapping[str, Any], name: str) -> Text:
    words = [name, tree.get("kind", ""), "DRAINING" if tree.get("draining") else "", tree.get("about", "")]
    if tree.get("uptime_s") is not None:
        words.append(f"up {tree['uptime_s']:,.0f} s")
    return _name(" · ".join(filter(None, words)), _MAX_LINE, style="bold")


def _states(tree: Mapping[str, Any]) -> Text:
    return _name(" · ".join(f"{label} {_state(label, value)}" for label, value in tree["states"].items()), _MAX_LINE)


def _state(label: str, value: float) -> str:
    return _BREAKER.get(value, "?") if label.startswith("tier ") else _count(value)


def _troubles(course: Course) -> Iterator[Text]:
    if course.error:
        yield _name(f"NO ANSWER for {course.gap_s:,.0f} s: {course.error}", _MAX_LINE, style="bold red")
    elif course.gap_s:
        yield Text(f"back after {course.gap_s:,.0f} s without an answer", style="yellow")
    if course.restarts:
        yield Text(f"{course.restarts} restarts seen: counts are those since the last one", style="yellow")


def _rates(tree: Mapping[str, Any]) -> Text:
    parts = []
    if tree["hit_rate"]:
        rate = tree["hit_rate"]
        parts.append(f"hit rate {_percent(rate['now'])} now, {_percent(rate['total'])} in all (of {rate['unit']})")
    if tree["first_token_s"]:
        first = tree["first_token_s"]
        parts.append(f"first token after {_seconds(first['now'])} now, {_seconds(first['total'])} in all")
    return Text("; ".join(parts))


def _flows(tree: Mapping[str, Any]) -> Table:
    table = Table("", *_figures("per second", "in all"), "", box=None, pad_edge=False)
    for flow in tree["flows"]:
        is_bytes = flow["unit"] == "bytes"
        show = size if is_bytes else _count
        per_s = "-" if flow["per_s"] is None else show(flow["per_s"])
        table.add_row(_name(flow["label"]), per_s, show(flow["total"]), "" if is_bytes else flow["unit"])
    return table


def _rooms(tree: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tiers, and then the quotas, with bars."""
    tiers = [
        (tier, each["used"], each["capacity"], size if each["unit"] == "bytes" else _count)
        for tier, each in tree["tiers"].items()
    ]
    quotas = [
        (f"{each['tenant']} {each['quota']}".strip(), each["used_bytes"], each["capacity_bytes"], size)
        for each in tree["quotas"][:_MAX_QUOTAS]
    ]
    for title, rooms in (("tier", tiers), ("quota", quotas)):
        if not rooms:
            continue
        table = Table(
            title, *_figures("used", "of"), *numbers("%"), Column("", width=_BAR_WIDTH), box=None, pad_edge=False
        )
        for name, used, whole, show in rooms:
            share = used / whole if whole else 0.0
            bar = Bar(1.0, 0.0, min(share, 1.0), width=_BAR_WIDTH, color="green" if share < 0.9 else "yellow")
            table.add_row(_name(name, _MAX_ROOM), show(used), show(whole), f"{share:.0%}", bar)
        yield table


def _failures(tree: Mapping[str, Any]) -> Iterator[Text]:
    found = {label: each for label, each in tree["failures"].items() if each["total"]}
    if not found:
        yield Text("failures: none", style="green")
        return
    parts = (f"{label} {_count(each['total'])} ({_growth(each['per_s'])})" for label, each in found.items())
    is_growing = any(each["per_s"] for each in found.values())
    yield _name(f"failures: {', '.join(parts)}", _MAX_LINE, style="red" if is_growing else "yellow")


def _spaces(tree: Mapping[str, Any]) -> Iterator[Table]:
    if not tree["namespaces"]:
        return
    id_ = Column("namespace", no_wrap=True, min_width=16)
    model = Column("model", no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)  # it alone shrinks
    tenant = Column("tenant", no_wrap=True, max_width=10)
    figures_ = [*_figures("held"), *numbers("chunks", "clients", "hits now")]
    table = Table(id_, model, tenant, *figures_, box=None, pad_edge=False, expand=True)
    for each in tree["namespaces"]:
        shown = size(each["used_bytes"]), _count(each["chunks"]), _count(each["clients"])
        hits = _percent(each["hit_rate"]["now"])
        table.add_row(_name(each["namespace"], 16), _name(each["model"]), _name(each["tenant"], 10), *shown, hits)
    yield table


def _figures(*titles: str) -> list[Column]:
    return [Column(title, justify="right", no_wrap=True, min_width=_FIGURE_WIDTH) for title in titles]


def _name(text: str, longest: int = _MAX_NAME, style: str = "") -> Text:
    """Return text that others may have chosen, as nothing but text: without orders to a terminal, and short."""
    shown = printable(text.replace("\n", " ").replace("\t", " ").encode(errors="replace").decode())
    return Text(shown if len(shown) <= longest else f"{shown[: longest - 1]}…", style=style, overflow="ellipsis")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _seconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s:,.3f} s"


def _growth(per_s: float | None) -> str:
    return "-" if per_s is None else f"{_count(per_s)}/s"


def _count(number: float) -> str:
    """Format a number in at most 8 characters."""
    if 0 < number < 10:
        return f"{number:.1f}".removesuffix(".0")
    for unit in ("", " k", " M", " G"):
        if number < 100_000:
            return f"{number:,.0f}{unit}"
        number /= 1000
    return f"{number:,.0f} T"
