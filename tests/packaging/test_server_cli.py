"""Commands for the cache server, against a server in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.cache_server import ServerThread, serving_ipc
from support.served import used_bytes
from typer.testing import CliRunner

from kvstore.model.chunks import ChunkRef
from kvstore.model.keys import Namespace, PrefixHasher
from kvstore.server.exposition import Exposition
from kvstore.testing.harness import EVEN, MINE, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, TierSetup
from kvstore.tiers.server.tier import ServerTier
from kvstore.tools.cli import app
from kvstore.tools.commands import serving
from kvstore.tools.commands.cache_server import _tables

RUNNER = CliRunner()
COMMANDS = ["serve", "keygen", "ping", "stats", "lookup", "explain", "pin", "pins", "unpin", "clear"]
TOKENS = list(range(200))  # three chunks of 64, and half a block


def chunks_of(tokens: list[int]) -> list[ChunkRef]:
    hasher = PrefixHasher(EVEN.chunk_tokens, EVEN.block_tokens)
    hasher.update(tokens)
    return [ChunkRef(key, EVEN.blocks_per_chunk) for key in hasher.chunk_keys()]


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving_ipc() as server:
        yield server


@pytest.fixture
def tier(server: ServerThread) -> Iterator[ServerTier]:
    tier = ServerTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": server.url}))
    yield tier
    tier.close()


@pytest.fixture
def prompt(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(TOKENS))
    return ["--tokens", str(file)]


def run(server: ServerThread, command: str, *arguments: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, [command, "--url", server.url, *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    result = RUNNER.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: kvstore {command}" in result.output


def test_ping(server: ServerThread, tmp_path: Path) -> None:
    assert run(server, "ping") == "ok\n"
    assert RUNNER.invoke(app, ["ping", "--url", f"kvs+ipc://{tmp_path}"]).exit_code == 1
    assert RUNNER.invoke(app, ["ping", "--url", "redis://x"]).exit_code == 2
    server.hub.core.is_closing = True
    assert run(server, "ping", code=1) == "closing\n"


def test_a_prompt_that_is_there_and_one_that_is_not(server: ServerThread, tier: ServerTier, prompt: list[str]) -> None:
    for command, code in (("explain", 0), ("lookup", 1)):
        assert "the server is empty: it holds no chunks, and no engine" in run(server, command, *prompt, code=code)
        assert "no namespace with 'llama'" in run(server, command, *prompt, "--model", "llama", code=code)
    refs = chunks_of(TOKENS)
    tier.put([make_transfer(EVEN, ref) for ref in refs[:2]])
    assert "128 of 200 tokens" in run(server, "lookup", *prompt)
    assert list(json.loads(run(server, "lookup", *prompt, "--json"))["found"].values()) == [128]
    assert "chunk 2 is missing: it was never stored" in run(server, "explain", *prompt)
    tier.remove([refs[1]])
    assert "chunk 1 is missing: it was cleared" in run(server, "explain", *prompt)
    tier.put([make_transfer(EVEN, ref) for ref in refs[1:]])
    assert "all of it that can be stored is there" in run(server, "explain", *prompt)
    assert "192 of 200 tokens" in run(server, "lookup", *prompt, "--model", "conf")
    assert "kvstore explain says why" in run(server, "lookup", *prompt, "--salt", "other", code=1)


def test_a_tail_counts(server: ServerThread, tier: ServerTier, prompt: list[str]) -> None:
    hasher = PrefixHasher(EVEN.chunk_tokens, EVEN.block_tokens)
    hasher.update(TOKENS)
    tier.put([make_transfer(EVEN, ref) for ref in [chunks_of(TOKENS)[0], ChunkRef(hasher.block_keys(1)[2], 3)]])
    assert "112 of 200 tokens" in run(server, "lookup", *prompt)


def test_pinned_chunks_stay(server: ServerThread, tier: ServerTier, prompt: list[str]) -> None:
    refs = chunks_of(TOKENS)
    tier.put([make_transfer(EVEN, ref) for ref in refs])
    assert run(server, "pin", *prompt) == "3 chunks pinned\n"
    assert all(server.hub.stock._chunks[key].is_pinned for key in list(server.hub.stock._chunks))
    assert run(server, "pin", *prompt, "--for", "60") == "3 chunks pinned\n"
    (pins,) = json.loads(run(server, "pins", "--json"))["pins"]
    assert (pins["chunks"], pins["bytes"]) == (3, server.hub.stock.pins.used_bytes)
    assert pins["ends_in_s"] <= 60
    assert "3 chunks, 0 MiB, for" in run(server, "pins")
    assert run(server, "unpin", *prompt) == "3 chunks unpinned\n"
    assert server.hub.stock.pins.used_bytes == 0
    assert run(server, "pins") == "nothing is pinned\n"
    run(server, "unpin", *prompt, code=1)
    run(server, "pin", *prompt)
    assert run(server, "unpin", "--all") == "3 chunks unpinned\n"
    assert server.hub.stock.pins.used_bytes == 0


def test_stats_and_clear(server: ServerThread, tier: ServerTier, prompt: list[str]) -> None:
    tier.put([make_transfer(EVEN, ref) for ref in chunks_of(TOKENS)])
    assert "memory" in run(server, "stats")
    tree = json.loads(run(server, "stats", "--json"))
    (space,) = tree["namespaces"]
    assert space["chunks"] == space["counters"]["stored_chunks"] == 3
    assert tree["tiers"]["memory"]["used_bytes"] == space["used_bytes"] == tier._connections.use(used_bytes)
    run(server, "clear", code=2)
    run(server, "clear", "--namespace", "0" * 16, code=2)
    assert run(server, "clear", "--namespace", space["id"]) == "3 chunks forgotten\n"
    assert run(server, "clear", "--all") == "0 chunks forgotten\n"
    run(server, "lookup", *prompt, code=1)


def test_a_namespace_has_one_id(tier: ServerTier, server: ServerThread, prompt: list[str]) -> None:
    """It is the id in engines' folders, whatever geometry a client has."""
    refs = chunks_of(TOKENS)
    tier.put([make_transfer(EVEN, ref) for ref in refs])
    odd = replace(EVEN, page_bytes=(2 * EVEN.page_bytes[0], *EVEN.page_bytes[1:]))
    other = ServerTier.open(TierSetup(MINE, odd, UNBOUNDED_BYTES, {"url": server.url}))
    other.put([make_transfer(odd, refs[0])])
    name = MINE.id.hex()
    assert name in run(server, "lookup", *prompt)
    assert name in run(server, "explain", *prompt)
    run(server, "pin", *prompt)
    assert name in run(server, "pins")
    tree = json.loads(run(server, "stats", "--json"))
    assert [space["id"] for space in tree["namespaces"]] == [name, name]
    page = Exposition().page(server.hub.snapshot(5.0))
    (line,) = (line for line in page.splitlines() if line.startswith("kvstore_server_namespace_chunks{"))
    assert line == f'kvstore_server_namespace_chunks{{namespace="{name}",model="{MINE.fields["model"]}"}} 4'
    assert run(server, "clear", "--namespace", name) == "4 chunks forgotten\n"
    other.close()


def test_stats_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit even with large numbers, and with long names of models, which alone are cut."""
    counters = dict.fromkeys(("found", "missing", "stored", "read", "evicted"), 98_765_432)
    space = {
        "id": "24b851fdbab6ab70",
        "fields": {"model": "files 0123456789abcdef of [a] model"},
        "clients": 16,
        "chunks": 987_654,
        "used_bytes": 5 << 40,
        "quota_bytes": 8 << 40,
        "counters": {f"{name}_chunks": count for name, count in counters.items()},
    }
    tier = {"used_bytes": 15 << 40, "capacity_bytes": 64 << 40, "chunks": 12_345_678}
    tree = {
        "version": "0.1.0",
        "status": "ok",
        "uptime_s": 1_234_567.0,
        "clients": 16,
        "tiers": {"memory": tier, "disk": tier},
        "namespaces": [space] * 2,
        "namespaces_left_out": 12,
    }
    printed = io.StringIO()
    Console(width=80, file=printed).print(_tables(tree))
    text = printed.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("24b851fdbab6ab70") == 4
    for whole in ("5,242,880", "8,388,608", "987,654", "98,765 k", "67,108,864", "12,345,678", "12 namespaces more"):
        assert whole in text, text


@pytest.mark.parametrize("text", ["{}", "[1, true]", "[1.5]", "no"])
def test_what_is_no_prompt(server: ServerThread, tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompt.json"
    file.write_text(text)
    assert "no JSON list of token ids" in run(server, "lookup", "--tokens", str(file), code=2)
    run(server, "lookup", code=2)


def test_keygen(tmp_path: Path) -> None:
    command = ["keygen", "--folder", str(tmp_path / "keys"), "server"]
    assert RUNNER.invoke(app, command).exit_code == 0
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"server.key", "server.pub"}
    assert RUNNER.invoke(app, command).exit_code == 2


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "needs an address"),
        ("server_listen: http://x", "cannot listen"),
        ("server_listen: kvs://127.0.0.1", "name host and port"),
        ("server_listen: kvs://0.0.0.0:5566", "kvstore keygen"),
        ("server_listen: kvs+ipc:///tmp/x\nserver_quotas: what", "server_quotas"),
        ("server_listen: kvs+ipc:///tmp/x\nserver_operators: admin", "lists nobody"),
        ("server_listen: kvs+ipc:///tmp/x\nlocal_disk: [/a, /b]\nmax_local_disk_size: 1", "one folder"),
        (f"server_listen: kvs+ipc:///{'x' * 120}", "too long"),
        ("max_local_cpu_size: 100000\nserver_listen: kvs+ipc:///tmp/x", "lower max_local_cpu_size"),
        ("server_listen: kvs+ipc:///tmp/x\nserver_key_file: /nowhere", "cannot be read"),
    ],
)
def test_check_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, says: str) -> None:
    monkeypatch.setattr(serving, "_FREEING_S", 0.0)
    file = tmp_path / "cache.yaml"
    file.write_text("max_local_cpu_size: 0.1\n" * ("cpu_size" not in lines) + lines)
    result = RUNNER.invoke(app, ["serve", "--check", "--config", str(file)])
    assert result.exit_code == 2
    assert says in result.output


def test_check_says_what_would_be(tmp_path: Path) -> None:
    file = tmp_path / "cache.yaml"
    file.write_text(
        f"max_local_cpu_size: 0.1\nserver_listen: kvs+ipc://{tmp_path}/run, kvs://127.0.0.1:0\n"
        f"local_disk: {tmp_path}/disk\nmax_local_disk_size: 2\nserver_quotas: big=1.5, *=0.5\n"
    )
    result = RUNNER.invoke(app, ["serve", "--check", "--json", "--config", str(file)])
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    assert plan["tiers"] == {"memory": "0.10 GiB", "disk": f"2.00 GiB in {tmp_path}/disk"}
    assert plan["quotas"] == {"big": "1.50 GiB", "*": "0.50 GiB"}
    assert len(plan["endpoints"]) == 2
    assert not (tmp_path / "run").exists()


def test_names_of_clients_are_no_orders_to_a_terminal(
    server: ServerThread, tier: ServerTier, prompt: list[str]
) -> None:
    escapes = "m\x1b]0;title\x07\x1b[2J"
    tier.put([make_transfer(EVEN, chunks_of(TOKENS)[0])])
    hostile = ServerTier.open(
        TierSetup(Namespace({"model": escapes, "x\x1b[31m": "y"}), EVEN, UNBOUNDED_BYTES, {"url": server.url})
    )
    hostile.put([make_transfer(EVEN, chunks_of(TOKENS)[0])])
    for command in ("explain", "lookup"):
        shown = RUNNER.invoke(app, [command, "--url", server.url, *prompt])
        assert "title" in shown.stdout
        assert "\x1b" not in shown.output
    assert "\x1b" not in run(server, "stats")
    hostile.close()
