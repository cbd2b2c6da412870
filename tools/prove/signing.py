"""Ed25519 signatures of certificates, by keys in PEM."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as error:
    raise ImportError("signatures need cryptography: pip install 'vllm-kvstore[encryption]'") from error

from kvstore.model.errors import ConfigError
from kvstore.tools.prove.forged import ForgedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALGORITHM: Final = "Ed25519"


def signer(path: Path) -> Callable[[bytes], Mapping[str, str]]:
    """Return a function that signs with a private key, as ``openssl genpkey -algorithm ed25519`` writes it.

    Raises:
        ConfigError: the file cannot be read, or has no such key, or a password.
    """
    key = _loaded(path, lambda pem: serialization.load_pem_private_key(pem, None))
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} has another key than one of {_ALGORITHM}: openssl genpkey -algorithm ed25519")
    public = _base64(key.public_key().public_bytes_raw())
    return lambda message: {"algorithm": _ALGORITHM, "public_key": public, "value": _base64(key.sign(message))}


def signer_of(signature: object, message: bytes, public_key: Path | None) -> str:
    """Return the public key, in base64, that signed a message: the one in the file, or any.

    Raises:
        ForgedError: the signature is wrong, or another key's.
        ConfigError: the file cannot be read, or has no public key of this kind.
    """
    found = signature if isinstance(signature, dict) else {}
    if found.get("algorithm") != _ALGORITHM:
        raise ForgedError(f"its signature is not one of {_ALGORITHM}")
    try:
        own = Ed25519PublicKey.from_public_bytes(_bytes(found.get("public_key")))
        value = _bytes(found.get("value"))
    except ValueError as error:
        raise ForgedError("its signature cannot be read") from error
    key = own
    if public_key is not None:
        given = _loaded(public_key, serialization.load_pem_public_key)
        if not isinstance(given, Ed25519PublicKey):
            raise ConfigError(f"{public_key} has no public key of {_ALGORITHM}: openssl pkey -in KEY -pubout")
        key = given
    name = _base64(key.public_bytes_raw())
    try:
        key.verify(value, message)
    except InvalidSignature as error:
        raise ForgedError(f"its signature is not one by {name}") from error
    return name


def _loaded(path: Path, load: Callable[[bytes], Any]) -> object:
    """Read a key from a file.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    try:
        return load(path.read_bytes())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{path} cannot be read as a key in PEM without a password: {type(error).__name__}"
        ) from error


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: object) -> bytes:
    """Return the bytes of a text in base64.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str):
        raise ValueError("no text")  # noqa: TRY004 - of what a file says
    return base64.b64decode(text, validate=True)
