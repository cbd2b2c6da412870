"""The image's recipe. ``deploy/image/check.sh`` builds it and runs it, which takes minutes and root."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.ops.access import Access
from kvstore.ops.admin_http import Page, PageServer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "image"
RECIPE = (FOLDER / "Dockerfile").read_text()


def arguments() -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", RECIPE, re.MULTILINE))


def test_its_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = arguments()["EXTRAS"].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()
    assert "server" in extras
    (torch,) = (text for text in project["dependencies"] if text.startswith("torch"))
    assert f"'{torch}'" in RECIPE  # installed first, from an index without CUDA


def test_it_runs_as_a_user_by_number() -> None:
    """Kubernetes cannot tell from a name that it is not root."""
    (user,) = re.findall(r"^USER (.*)$", RECIPE, re.MULTILINE)
    assert user == "${ID}:${ID}"
    assert int(arguments()["ID"]) == 10001
    values = (ROOT / "deploy/chart/kvstore/values.yaml").read_text()
    assert f"\nuser: {arguments()['ID']}\n" in values


def test_only_the_wheel_gets_to_the_builder() -> None:
    assert (FOLDER / "Dockerfile.dockerignore").read_text().split() == ["*", "!vllm_kvstore-*.whl"]
    assert re.findall(r"^COPY (.*)$", RECIPE, re.MULTILINE) == ["vllm_kvstore-*.whl /tmp/kvstore/"]


@pytest.fixture(params=[200, 503], ids=["healthy", "closing"])
def page(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    pages = {("GET", "/healthz"): Page(lambda: (request.param, "x\n"), is_open=True)}
    access = Access("127.0.0.1", None, "none")
    server = PageServer(pages, access, "127.0.0.1", 0, name="a page", remedy="none")
    yield server.port, request.param
    server.close()


def test_the_health_check_asks_the_server(page: tuple[int, int]) -> None:
    port, status = page
    (text,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", RECIPE, re.MULTILINE)
    _, *rest = json.loads(text)
    environment = {**os.environ, "KVSTORE_SERVER_HTTP_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    result = subprocess.run([sys.executable, *rest], env=environment, capture_output=True, check=False)
    assert (result.returncode == 0) is (status == 200)
    environment["KVSTORE_SERVER_HTTP_PORT"] = "1"
    assert subprocess.run([sys.executable, *rest], env=environment, capture_output=True, check=False).returncode
