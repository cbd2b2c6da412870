"""Store in the cloud, or with its interface: S3, Azure Blob Storage, Google Cloud Storage.

obstore finds credentials, lists, deletes, moves small objects and signs URLs. Chunks move by ``wire.py``.
"""

from __future__ import annotations

import configparser
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as error:
    raise ImportError("the object tier needs obstore: pip install 'vllm-kvstore[object]'") from error

if TYPE_CHECKING:
    from obstore.store import S3Credential

from kvstore.model.errors import ClosedError, ConfigError, TierError, TierSetupError
from kvstore.tiers.object.store import Body, FullError, Listed, Reading, Store, batches
from kvstore.tiers.object.url import Kind, ObjectTarget
from kvstore.tiers.object.wire import FULL_CODES, Request, Wire

_SIGNED_FOR: Final = timedelta(minutes=15)
_REREAD_AFTER: Final = timedelta(minutes=5)  # a credentials file, which may have been renewed
_PAGE: Final = 1000
_CODE: Final = re.compile("<Code>([A-Za-z]+)</Code>")
_REGION: Final = "us-east-1"  # what stores with the interface of S3 expect


class CloudStore(Store):
    """Objects in a bucket. Thread-safe.

    Args:
        target: the bucket and its settings.

    Raises:
        ConfigError: a setting is wrong, or a file cannot be read.
    """

    def __init__(self, target: ObjectTarget) -> None:
        self.place = str(target)
        self._prefix = f"{target.prefix}/" if target.prefix else ""
        self._put_headers = {"x-ms-blob-type": "BlockBlob"} if target.kind is Kind.AZURE else {}
        self._is_closed = False
        try:
            self._bucket = _open_bucket(target)
            self._wire = Wire(
                self.place,
                connections=target.connections,
                timeout_s=target.timeout_s,
                connect_timeout_s=target.connect_timeout_s,
                ca_file=str(target.tls_ca) if target.tls_ca else None,
            )
        except (exceptions.BaseError, ssl.SSLError, OSError, ValueError) as error:
            raise ConfigError(f"{self.place} cannot be used: {_reason(error)}") from error

    def put(self, name: str, body: Body) -> None:
        """See ``Store``: one request, whose body is not signed."""
        self._wire.send(Request("PUT", self._signed("PUT", name), self._put_headers), body)

    def open(
        self, name: str, offset: int = 0, num_bytes: int | None = None, version: str = ""
    ) -> AbstractContextManager[Reading | None]:
        """See ``Store``."""
        headers = {"If-Match": version} if version else {}
        if num_bytes is not None:
            headers["Range"] = f"bytes={offset}-{offset + num_bytes - 1}"
        return self._wire.receive(Request("GET", self._signed("GET", name), headers))

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """See ``Store``."""
        with self._translated():
            try:
                found = obstore.get(self._bucket, self._prefix + name, options={"range": (0, most_bytes)})
                return bytes(found.bytes())
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """See ``Store``."""
        with self._translated():
            obstore.put(self._bucket, self._prefix + name, data, use_multipart=False)

    def create(self, name: str, data: bytes) -> bool:
        """See ``Store``."""
        with self._translated():
            try:
                obstore.put(self._bucket, self._prefix + name, data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                return False
        return True

    def replace(self, name: str, old: bytes, data: bytes) -> bool:
        """See ``Store``."""
        with self._translated():
            try:
                found = obstore.get(self._bucket, self._prefix + name)
                if bytes(found.bytes()) != old:
                    return False
                version: Any = {"e_tag": found.meta["e_tag"]}
                obstore.put(self._bucket, self._prefix + name, data, mode=version, use_multipart=False)
            except (FileNotFoundError, exceptions.PreconditionError):
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """See ``Store``."""
        with self._translated():
            for batch in batches(names):
                try:
                    obstore.delete(self._bucket, [self._prefix + name for name in batch])
                except FileNotFoundError:  # from stores without a request for many
                    continue

    def list(self, prefix: str, start_after: str = "") -> Iterator[Listed]:
        """See ``Store``."""
        offset = self._prefix + start_after if start_after else None
        with self._translated():
            for page in obstore.list(self._bucket, self._prefix + prefix, offset=offset, chunk_size=_PAGE):
                for found in page:
                    name = found["path"].removeprefix(self._prefix)
                    yield Listed(name, found["size"], found["last_modified"].timestamp())

    def close(self) -> None:
        """See ``Store``."""
        self._is_closed = True
        self._wire.close()

    def _signed(self, method: Literal["GET", "PUT"], name: str) -> str:
        with self._translated():
            return obstore.sign(self._bucket, method, self._prefix + name, _SIGNED_FOR)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the client's exceptions."""
        if self._is_closed:
            raise ClosedError("the object tier was closed")
        try:
            yield
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise TierSetupError(f"{self.place} refuses these credentials: {_reason(error)}") from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            text = _reason(error)
            kind = FullError if any(code in text for code in FULL_CODES) else TierError
            raise kind(f"{self.place} failed: {text}") from error


def _open_bucket(target: ObjectTarget) -> AzureStore | GCSStore | S3Store:
    """Return obstore's client of a bucket, which retries nothing."""
    options: dict[str, Any] = {
        "client_options": _client_options(target),
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=target.timeout_s)},
    }
    if target.endpoint is not None:
        options["endpoint"] = target.endpoint
    match target.kind:
        case Kind.S3:
            return S3Store(target.bucket, **options, **_s3_options(target))
        case Kind.AZURE:
            return AzureStore(target.bucket, **options, **_section(target))
        case _:
            if target.credentials_file is not None:
                options["application_credentials"] = str(target.credentials_file)
            return GCSStore(target.bucket, **options)


def _client_options(target: ObjectTarget) -> dict[str, Any]:
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=target.timeout_s),
        "connect_timeout": timedelta(seconds=target.connect_timeout_s),
        "allow_http": (target.endpoint or "").startswith("http://"),
    }
    if target.tls_ca is not None:
        options["root_certificate"] = target.tls_ca.read_text()
    return options


def _s3_options(target: ObjectTarget) -> dict[str, Any]:
    is_path_style = target.endpoint is not None if target.path_style is None else target.path_style
    options: dict[str, Any] = {"virtual_hosted_style_request": not is_path_style}
    if target.region or target.endpoint:
        options["region"] = target.region or _REGION
    if target.credentials_file is not None:
        options["credential_provider"] = _from_file(target)
    return options


def _from_file(target: ObjectTarget) -> Callable[[], S3Credential]:
    """Return a provider of the credentials in a file, which reads it again every few minutes.

    Raises:
        ConfigError: the file lacks them now.
    """

    def provide() -> S3Credential:
        said = _section(target)
        try:
            return {
                "access_key_id": said["aws_access_key_id"],
                "secret_access_key": said["aws_secret_access_key"],
                "token": said.get("aws_session_token"),
                "expires_at": datetime.now(UTC) + _REREAD_AFTER,
            }
        except KeyError as error:
            raise ConfigError(f"{target.credentials_file} lacks {error} in [{target.profile}]") from error

    provide()
    return provide


def _section(target: ObjectTarget) -> Mapping[str, Any]:
    """Return the settings in a section of the credentials file; none without a file.

    Raises:
        ConfigError: it cannot be read, or lacks the section. The message shows nothing of its content.
    """
    if target.credentials_file is None:
        return {}
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        parser.read_string(Path(target.credentials_file).read_text())
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{target.credentials_file} cannot be read: {type(error).__name__}") from None
    if not parser.has_section(target.profile):
        raise ConfigError(f"{target.credentials_file} has no section [{target.profile}]: name one with profile")
    return dict(parser[target.profile])


def _reason(error: BaseException) -> str:
    """Return the store's code in an error, or its first line without addresses, which may be signed."""
    text = str(error).strip() or type(error).__name__
    code = _CODE.search(text)
    return code[1] if code else text.splitlines()[0].partition("?")[0][:300]
