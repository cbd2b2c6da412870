"""Tests of ``kvstore top``: with real servers and pages, on a real terminal, with hostile names."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from rich.console import Console
from support.cache_server import ServerProcess, ServerThread, serving_ipc, short_folder
from support.forked import forker
from support.redis_server import wait_for
from support.served import A, B, open_tier

from kvstore.model.keys import Namespace
from kvstore.ops.access import Access
from kvstore.ops.admin_http import Page, PageServer
from kvstore.server.exposition import Exposition
from kvstore.testing.harness import EVEN, make_transfer
from kvstore.tools.commands.top import _view
from kvstore.tools.live import Course, Sample
from kvstore.tools.processes import free_port

HOSTILE = "m\x1b]0;title\x07\x1b[2J[red]\u202e\nx" + "y" * 500


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving_ipc(quotas={"*": 1 << 30}) as server:
        yield server


@contextmanager
def page_of(text: str) -> Iterator[str]:
    """Serve a page, and yield its address."""
    page, access = Page(lambda: (200, text), is_open=True), Access("127.0.0.1", None, "none")
    pages = PageServer({("GET", "/metrics"): page}, access, "127.0.0.1", 0, name="a page", remedy="none")
    try:
        yield f"http://127.0.0.1:{pages.port}/metrics"
    finally:
        pages.close()


def fill(server: ServerThread, *namespaces: str) -> None:
    for name in namespaces:
        tier = open_tier(server.url, namespace=Namespace({"model": name}))
        tier.put([make_transfer(EVEN, A)])
        tier.look([A, B])
        tier.close()


def figures_of(output: str) -> dict[str, Any]:
    (line,) = output.splitlines()
    tree: dict[str, Any] = json.loads(line)
    return tree


class TestOnce:
    def test_a_server_and_its_page_say_the_same(self, server: ServerThread, run: Any) -> None:
        fill(server, "m")
        first = figures_of(run("top", server.url, "--once", "--json").stdout)
        assert first["hit_rate"] == {"now": None, "total": 0.5, "unit": "chunks"}
        assert first["tiers"]["memory"]["chunks"] == 1
        (space,) = first["namespaces"]
        assert (space["model"], space["chunks"]) == ("m", 1)
        assert [quota["quota"] for quota in first["quotas"]] == ["*"]
        with page_of(Exposition().page(server.hub.snapshot(5.0))) as url:
            second = figures_of(run("top", url, "--once", "--json").stdout)
        for name in ("kind", "draining", "hit_rate", "tiers", "flows", "failures", "namespaces", "quotas"):
            assert first[name] == second[name]

    def test_the_url_of_other_commands(self, server: ServerThread, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert run("top", "--url", server.url, "--once").exit_code == 0
        monkeypatch.setenv("KVSTORE_REMOTE_URL", server.url)
        assert "cache server" in run("top", "--once").stdout

    def test_exit_codes(self, tmp_path: Path, run: Any) -> None:
        assert run("top", "--once").exit_code == 2
        assert run("top", "redis://127.0.0.1", "--once").exit_code == 2
        assert run("top", "http://", "--once").exit_code == 2
        assert run("top", f"kvs+ipc://{tmp_path}", "--once").exit_code == 1
        assert run("top", f"http://127.0.0.1:{free_port()}", "--once").exit_code == 1

    @pytest.mark.parametrize(
        ("text", "code", "says"),
        [
            ("python_info 1\n", 2, "no metrics of kvstore"),
            ("<html>\n", 1, "gives no metrics"),
            ("", 2, "no metrics of"),
        ],
    )
    def test_a_page_that_is_not_ours(self, run: Any, text: str, code: int, says: str) -> None:
        with page_of(text) as url:
            result = run("top", url, "--once")
        assert (result.exit_code, says in result.stderr) == (code, True)


class TestPicture:
    def test_names_of_clients_are_no_orders_to_a_terminal(self, server: ServerThread, run: Any) -> None:
        fill(server, HOSTILE)
        with page_of(Exposition().page(server.hub.snapshot(5.0))) as url:
            for target in (server.url, url):
                shown = run("top", target, "--once").stdout
                assert "title" in shown
                assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
                assert "[red]" in run("top", target, "--once", "--json").stdout

    def test_the_head_says_that_it_drains(self, server: ServerThread, run: Any) -> None:
        assert "DRAINING" not in run("top", server.url, "--once").stdout
        text = Exposition().page(server.hub.snapshot(5.0) | {"status": "closing"})
        with page_of(text) as url:
            assert "cache server · DRAINING" in run("top", url, "--once").stdout.splitlines()[0]

    def test_it_fits_80_columns(self, server: ServerThread) -> None:
        fill(server, HOSTILE, "other")
        tree = server.hub.snapshot(5.0)
        for tier in tree["tiers"].values():
            tier.update(capacity_bytes=999 << 40, used_bytes=998 << 40, chunks=1 << 40)
        for space in tree["namespaces"]:
            space.update(used_bytes=998 << 40, chunks=1 << 40, clients=16_384, tenant="t" * 100)
            space["counters"] = dict.fromkeys(space["counters"], 1 << 50)
        course = Course()
        course.add(Sample.of_stats(1.0, 1.0, tree))
        course.add(Sample.of_stats(2.0, 2.0, {**tree, "uptime_s": tree["uptime_s"] + 1}))
        course.miss(9.0, "refused " * 40)
        printed = io.StringIO()
        Console(width=80, file=printed).print(_view(course, "kvs+ipc:///" + "long/" * 40))
        lines = printed.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert "NO ANSWER for 7 s" in printed.getvalue()
        assert "16,384" in lines[-1]


class Screen:
    """A command on a terminal of 80 by 24."""

    def __init__(self, *words: object) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        command = ["kvstore.tools.cli", "top", *words]
        self.process = forker().start(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.text = ""

    def read(self) -> str:
        """Return all that was written so far."""
        while select.select([self._ours], [], [], 0.1)[0]:
            try:
                self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:  # the command has ended
                break
        return self.text

    def shows(self, text: str) -> None:
        begin = len(self.text)
        try:
            wait_for(f"the screen shows {text}", lambda: text in self.read()[begin:])
        except BaseException:
            print(self.text[begin:][-3000:])
            raise

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        wait_for("it ends", lambda: (self.read(), self.process.poll() is not None)[1])
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        os.close(self._ours)


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back() -> None:
    """On a terminal: the gap and the restart are shown, and the terminal is as before at the end."""
    with short_folder() as folder:
        server = ServerProcess(folder)
        screen = None
        try:
            server.start()
            screen = Screen(server.url, "--every", "0.2")
            screen.shows("cache server")
            server.kill()
            screen.shows("NO ANSWER")
            server.start()
            screen.shows("1 restarts seen")
            assert screen.end(signal.SIGTERM) == 0
            assert "\x1b[?1049h" in screen.text
            assert screen.text.rindex("\x1b[?1049l") > screen.text.rindex("restarts")
            assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("restarts")
        finally:
            if screen is not None:
                screen.close()
            server.kill()


@pytest.mark.slow
def test_one_line_a_sample(server: ServerThread) -> None:
    fill(server, "m")
    words = ["kvstore.tools.cli", "top", server.url, "--json", "--every", "0.1"]
    with forker().start(words, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            trees = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert [tree["hit_rate"]["now"] for tree in trees] == [None, None, None], "nobody asks"
    assert trees[2]["flows"][0]["per_s"] == 0.0
