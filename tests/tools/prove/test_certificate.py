"""Certificates of ``kvstore prove``: digest, signature, page, and ``--check``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvstore.tools.prove.certificate import FORMAT, body_of, check, seal
from kvstore.tools.prove.forged import ForgedError
from kvstore.tools.prove.judgement import Reference, judge
from kvstore.tools.prove.outputs import Difference, NoOutput, Output, digest
from kvstore.tools.prove.page import page_of
from kvstore.tools.prove.prompts import Prompts
from kvstore.tools.prove.run import Proof
from kvstore.tools.prove.settings import read_settings
from kvstore.tools.prove.signing import signer
from kvstore.tools.prove.situations import Measured, Situation

OUTPUT = Output((5, 6), (-0.5, -0.25), (1.0, 0.5), prompt_tokens=700, cached_tokens=0)
SECRET = "s3cret-of-the-user"


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a pair as openssl does."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    none = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def proof(tmp_path: Path) -> Proof:
    config = tmp_path / "kvstore.yaml"
    config.write_text(f"remote_url: redis://user:{SECRET}@cache:6379\nremote_password: {SECRET}\n")
    flags = ["<b>model</b>", "--hf-token", SECRET, "--model-loader-extra-config", json.dumps({"api_key": SECRET})]
    settings = read_settings(flags, config, "run")
    reference = Reference([OUTPUT], None, {Situation.AGAIN: Difference(gap=math.inf)})
    results = [
        judge(Situation.PLAIN, Measured([OUTPUT]), reference),
        judge(Situation.DISK, Measured([NoOutput("<script>alert(1)</script>")]), reference),
    ]
    prompts = Prompts((f"my {SECRET}",), built_in=False)
    return Proof(settings, prompts, results, reference, ["<i>peers</i>"], {"dtype": "float32"})


def test_nothing_secret_and_nothing_infinite(proof: Proof) -> None:
    body = body_of(proof)
    text = json.dumps(seal(body, None), allow_nan=False)
    assert SECRET not in text
    assert (body["format"], body["verdict"], body["vllm_own"]["tolerance"]) == (FORMAT, "failed", "infinite")
    assert body["vllm"]["arguments"][:3] == ["<b>model</b>", "--hf-token", "***"]
    assert body["configuration"]["remote_password"] == "***"
    assert body["prompts"]["count"] == 1
    assert [one["situation"] for one in body["situations"]] == ["plain", "disk"]
    assert body["versions"].keys() >= {"kvstore", "vllm", "torch", "python"}
    assert body["machine"].keys() == {"platform", "cpu", "cpus", "gpus"}


def test_the_page_escapes_what_it_shows(proof: Proof) -> None:
    page = page_of(seal(body_of(proof), None), "not <u>signed</u>")
    for tag in ("<script", "<b>model", "<i>peers", "<u>", "http:", "https:", SECRET):
        assert tag not in page
    for shown in ("&lt;script&gt;", "&lt;b&gt;model", "&lt;i&gt;peers", "not &lt;u&gt;", "default-src &#x27;none"):
        assert shown in page or shown.startswith("default-src")
    assert "<title>kvstore: failed</title>" in page
    assert "default-src 'none'" in page


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda sealed: sealed["certificate"].update(verdict="proven"),
        lambda sealed: sealed["certificate"]["situations"][0].update(words="all is well"),
        lambda sealed: sealed["certificate"].update(more=1),
        lambda sealed: sealed["certificate"].update(more=math.nan),
        lambda sealed: sealed["certificate"].pop("left_out"),
        lambda sealed: sealed.update(sha256="0" * 64),
        lambda sealed: sealed.pop("sha256"),
    ],
)
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_changed_certificate_is_refused(proof: Proof, tmp_path: Path, change: Change, is_signed: bool) -> None:
    private, public = write_keys(tmp_path, "mine")
    sealed = json.loads(json.dumps(seal(body_of(proof), signer(private) if is_signed else None)))
    check(sealed, public if is_signed else None)
    change(sealed)
    with pytest.raises(ForgedError):
        check(sealed, None)


def test_a_signature(proof: Proof, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, "mine")
    other_private, other_public = write_keys(tmp_path, "other")
    body = body_of(proof)
    sealed = seal(body, signer(private))
    assert check(sealed, public).startswith("signed by ")
    assert "only --public-key can confirm" in check(sealed, None)
    with pytest.raises(ForgedError, match="not one by"):
        check(sealed, other_public)
    other = seal(body, signer(other_private))["signature"]
    for forged in (
        None,  # the signature was taken off
        other,
        sealed["signature"] | {"value": other["value"]},
        sealed["signature"] | {"value": "not base64"},
        sealed["signature"] | {"public_key": ""},
        sealed["signature"] | {"algorithm": "none"},
        {"algorithm": "Ed25519"},
        "signed",
    ):
        with pytest.raises(ForgedError):
            check(sealed | {"signature": forged}, public)
    assert "not signed" in check(sealed | {"signature": None}, None)


def test_a_digest_of_other_content_does_not_help(proof: Proof, tmp_path: Path) -> None:
    """A new digest is easily made, and has no signature."""
    private, public = write_keys(tmp_path, "mine")
    sealed = seal(body_of(proof), signer(private))
    forged = seal(sealed["certificate"] | {"verdict": "proven"}, None) | {"signature": sealed["signature"]}
    for key in (None, public):
        with pytest.raises(ForgedError, match="not one by"):
            check(forged, key)


@pytest.mark.parametrize(("verdict", "code"), [("proven", 0), ("not proven", 3), ("failed", 1), ("differs", 1)])
def test_check_exits_as_the_proof_did(proof: Proof, tmp_path: Path, run_json: Any, verdict: str, code: int) -> None:
    private, public = write_keys(tmp_path, "mine")
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(seal(body_of(proof) | {"verdict": verdict}, signer(private))))
    assert run_json("prove", "--check", file, "--public-key", public) == (code, json.loads(file.read_text()))
    file.write_text(file.read_text().replace('"failed"', '"proven"'))
    found, tree = run_json("prove", "--check", file)
    assert (found, "changed" in tree["forged"]) == (1, True)


def test_what_is_no_certificate_or_key(proof: Proof, tmp_path: Path, run: Any) -> None:
    file, key = tmp_path / "c.json", tmp_path / "k.pem"
    none = serialization.NoEncryption()
    curve = generate_private_key(SECP256R1())
    key.write_bytes(curve.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none))
    whole = {"format": FORMAT, "verdict": "proven", "situations": [], "left_out": []}
    bodies: list[object] = [[], {}, {"format": FORMAT}, whole | {"verdict": 1}, whole | {"format": "other"}]
    bodies += [whole | {"situations": [wrong]} for wrong in (1, {}, {"situation": "a", "verdict": 1, "words": ""})]
    bodies += [whole | {"left_out": [1]}, whole | {"left_out": "peers"}]
    sealed = [json.dumps({"certificate": body, "sha256": digest(body), "signature": None}) for body in bodies]
    for text in ("", "[]", "{}", "[" * 100_000, *sealed):
        file.write_text(text)
        assert run("prove", "--check", file).exit_code == 2, text[:100]
    file.write_text(json.dumps(seal(whole, None)))
    assert run("prove", "--check", file).exit_code == 0
    assert run("prove", "--check", tmp_path / "none").exit_code == 2
    file.write_text(json.dumps(seal(body_of(proof), signer(write_keys(tmp_path, "mine")[0]))))
    for wrong in (key, file, tmp_path / "none", tmp_path):
        assert run("prove", "--check", file, "--public-key", wrong).exit_code == 2
        assert run("prove", "--key", wrong, "--", "model").exit_code == 2
    assert run("prove", "--public-key", key, "--", "model").exit_code == 2
