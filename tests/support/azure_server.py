"""Azurite, Microsoft's emulator of Azure Blob Storage, for tests; skipped where it is not on the PATH."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.processes import free_port
from support.redis_server import wait_for

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
_VERSION = "2021-08-06"


@dataclass
class AzureServer:
    """Azurite with a separate folder."""

    folder: Path
    port: int = field(default_factory=free_port)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def url(self, container: str, prefix: str) -> str:
        keys = self.folder / "credentials"
        keys.write_text(f"[default]\naccount_name = {ACCOUNT}\naccount_key = {KEY}\n")
        return f"az://{container}/{prefix}?endpoint={self.endpoint}&credentials_file={keys}"

    def client(self, container: str) -> Any:
        from obstore.store import AzureStore

        options = {"allow_http": True, "timeout": timedelta(seconds=30)}
        given: Any = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.endpoint, "client_options": options}
        return AzureStore(container, **given)

    def make_container(self, container: str) -> bool:
        now = email.utils.formatdate(usegmt=True)
        text = "PUT" + "\n" * 12 + f"x-ms-date:{now}\nx-ms-version:{_VERSION}\n"
        text += f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
        headers = {"x-ms-date": now, "x-ms-version": _VERSION, "Content-Length": "0"}
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        request = urllib.request.Request(
            f"{self.endpoint}/{container}?restype=container", method="PUT", headers=headers
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status) == 201


@contextmanager
def running_azurite(folder: Path, container: str) -> Iterator[AzureServer]:
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not on the PATH: npm install azurite")
    server = AzureServer(folder)
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(server.port), "--location", str(folder / "data")]
    with (folder / "azurite.log").open("ab") as log:
        process = subprocess.Popen([*command, "--silent", "--skipApiVersionCheck"], stdout=log, stderr=log)
    try:
        wait_for("Azurite", lambda: server.make_container(container), 60.0)
        yield server
    finally:
        process.kill()
        process.wait()
