"""TLS with clients, where the certificate may be renewed, and with engines, whose certificate must be trusted."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.disaggregated import ProxyProcess
from support.fake_engine import DONE, EVENTS, FakeEngine
from support.proxied import ASKED, PATH, STREAMED
from support.redis_server import wait_for

Run = Callable[..., Any]
Pair = tuple[Path, Path]


def made_certificate(folder: Path, name: str) -> Pair:
    """Make a self-signed certificate of 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates, and is not there")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command += [
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return cert, key


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return made_certificate(tmp_path, "proxy")


def shown_by(proxy: ProxyProcess) -> str:
    return ssl.get_server_certificate(("127.0.0.1", proxy.port))


def test_on_both_sides(engines: list[FakeEngine], tmp_path: Path, pair: Pair) -> None:
    cert, key = pair
    prefill, decode = engines[:2]
    theirs = made_certificate(tmp_path, "engine")
    tls = FakeEngine(ssl_certfile=theirs[0], ssl_keyfile=theirs[1]).start()
    tls_url = tls.url.replace("http:", "https:")
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--health-interval-s", "0.1")
    trusting = ("--engine-ca", str(theirs[0]))
    trusted = ssl.create_default_context(cafile=cert)
    try:
        for more, status in ((trusting, 200), ((), 503)):
            proxy = ProxyProcess([prefill.url], [tls_url], tmp_path / "log", (*options, *more), scheme="https")
            with httpx.Client(base_url=proxy.start().url, trust_env=False, verify=trusted) as client:
                assert client.post(PATH, json=ASKED).status_code == status
                if status == 200:
                    assert client.post(PATH, json=STREAMED).content == b"".join((*EVENTS, DONE))
                    with pytest.raises(httpx.TransportError):
                        httpx.get(f"{proxy.url.replace('https:', 'http:')}/health", trust_env=False)
            proxy.kill()
        assert len(tls.seen) == 2
        assert "is left out: /health: SSLCertVerificationError: self-signed certificate" in proxy.log.read_text()
        assert not decode.seen
    finally:
        proxy.kill()
        tls.stop()


def test_a_certificate_that_is_renewed(engines: list[FakeEngine], tmp_path: Path, pair: Pair) -> None:
    cert, key = pair
    new_cert, new_key = made_certificate(tmp_path, "new")
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--health-interval-s", "0.1")
    proxy = ProxyProcess([engines[0].url], [engines[1].url], tmp_path / "log", options, scheme="https")
    try:
        proxy.start()
        old = shown_by(proxy)
        cert.write_text("broken", encoding="utf-8")
        wait_for("it is noticed", lambda: "proxy.pem stays as it was" in proxy.log.read_text())
        assert shown_by(proxy) == old
        new_key.replace(key)
        new_cert.replace(cert)
        wait_for("the new one is shown", lambda: shown_by(proxy) != old)
    finally:
        proxy.kill()


def test_files_that_cannot_be_used(run: Run, tmp_path: Path, pair: Pair) -> None:
    cert, key = pair
    other_cert, _ = made_certificate(tmp_path, "other")
    basic = ("proxy", "--prefill", "https://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--check")

    def wrong(*options: object) -> str:
        result = run(*basic, *options)
        assert result.exit_code == 2
        return str(result.stderr)

    assert "belong together" in wrong("--tls-cert", cert)
    assert "belong together" in wrong("--tls-key", key)
    assert "cannot be used together" in wrong("--tls-cert", other_cert, "--tls-key", key)
    assert "cannot be used together" in wrong("--tls-cert", tmp_path / "nowhere", "--tls-key", key)
    assert "cannot be used (" in wrong("--engine-ca", key)
    assert "No such file" in wrong("--engine-ca", tmp_path / "nowhere")
    key.chmod(0o644)
    assert "chmod 600" in wrong("--tls-cert", cert, "--tls-key", key)
    key.chmod(0o600)
    assert "https://127.0.0.1:8080" in run(*basic, "--tls-cert", cert, "--tls-key", key).stdout
    plain = ("proxy", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--check")
    assert "none is: leave it out" in run(*plain, "--engine-ca", cert).stderr
