"""The model with all keys of a configuration, and properties that depend on keys of several concerns.

The names are LMCache's where both systems have the key; as in LMCache, a size is a number of GiB for one worker.
"""

from __future__ import annotations

from typing import Final

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvstore.config.keys.handover import PD_ROLES, HandoverKeys, accepts_kv
from kvstore.config.keys.operation import OperationKeys, ServerKeys
from kvstore.config.keys.remote import RemoteKeys
from kvstore.config.keys.requests import REQUEST_FIELDS, RequestKeys
from kvstore.config.keys.storage import StorageKeys
from kvstore.protocol.loopback import is_loopback
from kvstore.tiers import READ_ONLY, tier_behind

__all__ = ["PD_ROLES", "REQUEST_FIELDS", "StoreConfig"]

_HIDDEN: Final = "***"


# Keys are listed, and checked, from the last parent to the first.
class StoreConfig(HandoverKeys, ServerKeys, OperationKeys, RemoteKeys, RequestKeys, StorageKeys):
    """Everything a user may set. Immutable; ``load_config`` is the usual way to get one.

    Building one directly raises ``pydantic.ValidationError``; ``load_config`` turns that into a ``ConfigError`` that
    says where the value came from.
    """

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of host memory that each worker reserves."""
        return self.max_local_cpu_bytes + (self.pd_buffer_size if self.listens else 0)

    @property
    def shared_name(self) -> str | None:
        """The shared tier's name between engines, without a login; None if nothing is written to it."""
        url = self.shared_url
        if url is None or tier_behind(url) in READ_ONLY:
            return None
        scheme, _, rest = url.partition("://")
        login, _, place = rest.rpartition("@")
        if "?" in login:  # ``place`` would be part of a password
            return None
        return f"{scheme}://{place.partition('?')[0].lower()}"

    @property
    def has_remote(self) -> bool:
        """True if chunks may come from other engines: through a shared tier, from peers or folders, or by handover."""
        return (
            self.shared_url is not None or self.enable_pd or bool(self.peers or (self.reshard_from and self.local_disk))
        )

    def shown(self) -> dict[str, object]:
        """Return all values for display, without passwords."""
        values = self.model_dump(mode="json")
        if self.remote_password is not None:
            values["remote_password"] = _HIDDEN
        for key in ("remote_url", "remote_host_url"):
            if (url := values[key]) is not None:
                values[key] = hide_login(url)
        values["peers"] = [hide_login(url) for url in self.peers]
        return values

    @field_validator("pd_peer_init_port")
    @classmethod
    def _may_listen(cls, value: int | tuple[int, ...] | None, info: ValidationInfo) -> int | tuple[int, ...] | None:
        given = info.data
        if value is None or not accepts_kv(*(given.get(key) for key in ("enable_pd", "pd_role", "pd_bidirectional"))):
            return value
        host = given.get("pd_peer_host", "127.0.0.1")
        has_keys = given.get("server_key_file") and given.get("server_clients")
        if not is_loopback(host) and not has_keys:
            message = (
                "other hosts can reach pd_peer_host {host}, so it needs server_key_file and server_clients: make keys "
                "with kvstore keygen, or set pd_peer_host to 127.0.0.1"
            )
            raise PydanticCustomError("port", message, {"host": host})
        return value


def hide_login(url: str) -> str:
    """Return a URL without the login before its ``@``, and without the values in its query."""
    scheme, _, rest = url.partition("://")
    login, at, place = rest.rpartition("@")  # before the query, because a password may contain a "?"
    place, mark, query = place.partition("?")
    options = "&".join(f"{option.partition('=')[0]}={_HIDDEN}" for option in query.split("&"))
    return f"{scheme}://{_HIDDEN if login else ''}{at}{place}{mark}{options if mark else ''}"
