"""Certificate of a proof: what was run on what, the results, and a digest that a key may sign.

The digest is the SHA-256 of the certificate's canonical JSON (sorted keys, no spaces), and the signature Ed25519's of
the same bytes. A certificate without a signature shows damage, but not who wrote it.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.tools.prove.forged import ForgedError
from kvstore.tools.prove.judgement import worst
from kvstore.tools.prove.outputs import Difference, canonical, digest
from kvstore.tools.prove.prompts import OUTPUT_TOKENS
from kvstore.tools.prove.settings import shown_words
from kvstore.tools.prove.situations import ABOUT, Result, Verdict

if TYPE_CHECKING:
    from kvstore.tools.prove.run import Proof

FORMAT: Final = "kvstore-certificate/1"
_MOST_BYTES: Final = 16 << 20
_PACKAGES: Final = ("vllm", "torch", "transformers", "numpy")


def body_of(proof: Proof) -> dict[str, Any]:
    """Return the certificate's content."""
    settings = proof.settings
    return {
        "format": FORMAT,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": settings.run_id,
        "verdict": str(worst(proof.results)),
        "versions": versions(),
        "machine": machine(),
        "vllm": {"arguments": shown_words(settings.words), "types": dict(proof.types)},
        "configuration": settings.config.shown(),
        "changed_for_the_proof": {key: value for key, value in settings.common().items() if key != "model_id"},
        "prompts": {**proof.prompts.described(), "output_tokens": OUTPUT_TOKENS},
        "vllm_own": {
            "tolerance": _finite(proof.reference.tolerance),
            "differences": {str(name): _of(own) for name, own in proof.reference.own.items()},
        },
        "situations": [_described(result) for result in proof.results],
        "left_out": list(proof.left_out),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of kvstore, Python and the packages that compute."""
    found: dict[str, str | None] = {"kvstore": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, object]:
    """Return the platform, the processor and the GPUs. Call it once no vLLM needs the memory of a GPU."""
    import torch  # noqa: PLC0415 - takes seconds, which a check of a certificate need not wait for

    from kvstore.tools.bench.load import cpu_name  # noqa: PLC0415 - needs numpy

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"platform": platform.platform(), "cpu": cpu_name(), "cpus": os.cpu_count(), "gpus": gpus}


def seal(body: Mapping[str, Any], sign: Callable[[bytes], Mapping[str, str]] | None) -> dict[str, Any]:
    """Return a certificate with its digest, and with the signature that ``sign`` makes of its bytes."""
    signature = None if sign is None else dict(sign(canonical(body)))
    return {"certificate": dict(body), "sha256": digest(body), "signature": signature}


def read_certificate(path: Path) -> dict[str, Any]:
    """Read a certificate.

    Raises:
        ConfigError: the file cannot be read, or is no certificate.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        found = json.loads(raw) if len(raw) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a certificate: {type(error).__name__}") from error
    sealed: dict[str, Any] = found if isinstance(found, dict) else {}
    if not _is_shown(sealed.get("certificate")):
        raise ConfigError(f"{path} is no certificate of this version's format, {FORMAT}")
    return sealed


def check(sealed: Mapping[str, Any], public_key: Path | None) -> str:
    """Check a certificate, and return by whom it is signed.

    Args:
        sealed: the certificate.
        public_key: file of the key that must have signed it; None for any, or none.

    Raises:
        ForgedError: its digest or its signature is wrong, or it is not signed by this key.
        ConfigError: the file of the key cannot be used.
        ImportError: it is signed, and the package that checks signatures is missing.
    """
    body, signature = sealed["certificate"], sealed.get("signature")
    try:
        message = canonical(body)
    except (ValueError, RecursionError) as error:
        raise ForgedError("it has a value that no certificate has") from error
    if digest(body) != sealed.get("sha256"):
        raise ForgedError("its content does not have its SHA-256: it was changed")
    if signature is None:
        if public_key is not None:
            raise ForgedError("it is not signed")
        return "not signed: the SHA-256 shows damage, but not who wrote it"
    from kvstore.tools.prove.signing import signer_of  # noqa: PLC0415 - an extra

    name = signer_of(signature, message, public_key)
    return f"signed by {name}" if public_key is not None else f"signed by {name}, whom only --public-key can confirm"


def _is_shown(body: object) -> bool:
    """Tell if a content is of this version's format, with all that is printed of it."""
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("verdict") not in list(Verdict):
        return False
    situations, left_out = body.get("situations"), body.get("left_out")
    if not isinstance(situations, list) or not isinstance(left_out, list):
        return False
    texts = [one.get(name) for one in situations if isinstance(one, dict) for name in ("situation", "verdict", "words")]
    return len(texts) == 3 * len(situations) and all(isinstance(text, str) for text in (*texts, *left_out))


def _described(result: Result) -> dict[str, Any]:
    about = {"situation": str(result.situation), "about": ABOUT[result.situation], "verdict": str(result.verdict)}
    return {**asdict(result), **about, "difference": _of(result.difference)}


def _of(difference: Difference) -> dict[str, Any]:
    """Return a difference without infinity, which JSON lacks."""
    return {name: _finite(value) for name, value in asdict(difference).items()}


def _finite(value: float) -> float | str:
    return "infinite" if value == math.inf else value
