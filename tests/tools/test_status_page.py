"""The status page of a cache server, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.browser import Browser, browsing
from support.cache_server import ServerProcess, serving_process
from support.redis_server import wait_for
from support.served import open_tier

from kvstore.model.keys import Namespace
from kvstore.testing.harness import EVEN, make_ref, make_transfer
from kvstore.tools.processes import free_port
from kvstore.tools.serve import history

PAGE = Path(history.__file__).with_name("status.html")
HOSTILE = "<img src=x onerror=alert(1)>"
TOKEN = "token-of-an-operator"
REFS = [make_ref(number) for number in range(10)]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser
        assert not [each for each in browser.complaints if "401" not in each and "ERR_CONNECTION" not in each]


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with serving_process(disk_gib=0.1) as process:
        process.terminate()
        yield process


def start(process: ServerProcess, more: str = "") -> str:
    port = free_port()
    process.config.write_text(process.config.read_text() + f"server_http_port: {port}\n{more}")
    process.start()
    return f"http://127.0.0.1:{port}/"


def text(browser: Browser, name: str) -> str:
    return str(browser.value(f"document.getElementById('{name}').innerText"))


@pytest.mark.sweep
def test_live_figures(process: ServerProcess, browser: Browser, tmp_path: Path) -> None:
    url = start(process, "server_quotas: '*=0.05'\n")
    tier = open_tier(process.url, namespace=Namespace({"model": HOSTILE}))
    tier.put([make_transfer(EVEN, REFS[0])])
    browser.open(url)
    wait_for("the server is shown", lambda: text(browser, "state") == "ready")
    assert "memory" in text(browser, "tiers")
    assert HOSTILE in text(browser, "spaces")
    assert browser.value("document.images.length") == 0, "names are text"
    assert "1 of 1" in text(browser, "counted")
    before = text(browser, "spaces")
    tier.put([make_transfer(EVEN, ref) for ref in REFS])
    wait_for("the figures change", lambda: text(browser, "spaces") != before and "\t10\t" in text(browser, "spaces"))
    for width, height in ((1280, 800), (400, 800)):
        browser.resize(width, height)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
        browser.screenshot(tmp_path / f"{width}.png")
        assert (tmp_path / f"{width}.png").stat().st_size > 10_000
    tier.close()
    process.kill()
    wait_for("its end is shown", lambda: text(browser, "state") == "no answer")
    process.start()
    browser.value("look()")
    wait_for("it is shown again", lambda: text(browser, "state") == "ready")


@pytest.mark.sweep
def test_nothing_can_be_read_without_the_token(process: ServerProcess, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    url = start(process, f"server_http_host: 0.0.0.0\nserver_http_token_file: {file}\n")
    with httpx.Client(base_url=url) as client:
        assert client.get("/status.json").status_code == 401
        page = client.get("/")
        assert page.status_code == 200
        assert page.text == PAGE.read_text("utf-8"), "the page itself has no figures"
        assert client.get("/status.json", headers={"authorization": f"Bearer {TOKEN}"}).json()["status"] == "ok"
    browser.open(url)
    wait_for("the token is asked for", lambda: "token is missing" in text(browser, "state"))
    assert browser.value("document.getElementById('all').hidden")
    browser.value(f"document.getElementById('token').value = '{TOKEN}'")
    browser.value("document.getElementById('ask').requestSubmit()")
    wait_for("the server is shown", lambda: text(browser, "state") == "ready")
    assert not browser.value("document.getElementById('all').hidden")
    assert browser.value("document.getElementById('ask').hidden")


@pytest.mark.sweep
def test_ten_thousand_namespaces(process: ServerProcess, browser: Browser) -> None:
    browser.open(start(process))
    wait_for("the server is shown", lambda: text(browser, "state") == "ready")
    many = """Array.from({length: 10000}, (_, number) => ({id: `id-${number}`, tenant: "",
        fields: {model: `model-${number}`}, chunks: 1, used_bytes: 1, quota_bytes: null, clients: 0,
        counters: {found_chunks: 1, missing_chunks: 1, evicted_chunks: 0, full: 0, failed: 0}}))"""
    browser.value(f"show({{...shown, namespaces: {many}, namespaces_left_out: 5}})")
    assert "100 of 10,005" in text(browser, "counted")
    assert browser.value("document.querySelectorAll('#spaces td.name').length") == 200, "model and tenant of 100 rows"
    browser.value("document.getElementById('filter').value = 'model-9999'; spaces(shown)")
    assert "id-9999" in text(browser, "spaces")


def test_the_page_needs_no_other_host() -> None:
    page = PAGE.read_text("utf-8")
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}, "the name of a format"
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", page)


def space(name: str, **counters: int) -> dict[str, object]:
    return {"space": name, "counters": {**dict.fromkeys(history._COUNTERS, 0), **counters}}


def test_a_sample_has_what_happened_meanwhile() -> None:
    tiers = {"memory": {"used_bytes": 7}}
    before = {
        "uptime_s": 10.0,
        "namespaces": [space("a", found_chunks=5), space("gone", found_chunks=9)],
        "tiers": tiers,
    }
    spaces = [space("a", found_chunks=8, stored_bytes=4), space("new", found_chunks=100)]
    now = {"uptime_s": 20.0, "namespaces": spaces, "tiers": tiers}
    taken = history.sample(before, now)
    assert (taken["found_chunks"], taken["stored_bytes"], taken["missing_chunks"]) == (3, 4, 0)
    assert (taken["took_s"], taken["memory_used_bytes"]) == (10.0, 7)


def test_the_past_has_a_bound_and_an_end() -> None:
    asked: list[int] = []

    def snapshot() -> dict[str, object]:
        asked.append(1)
        if len(asked) % 5 == 0:
            raise TimeoutError
        return {"uptime_s": 1.0, "namespaces": [], "tiers": {}}

    past = history.History(snapshot, each_s=0.0001)
    wait_for("it is full", lambda: len(past.samples()) == 360 and len(asked) > 1000)
    past.close()
    assert not past._thread.is_alive()
