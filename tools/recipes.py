"""Conversion of LMCache's settings for several engines to kvstore's keys, with recipes for manual steps.

A recipe is one line. It contains only host and port of an address, because addresses may contain logins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from kvstore.config.lmcache import NOT_IMPLEMENTED
from kvstore.config.problems import one_line
from kvstore.config.schema import PD_ROLES
from kvstore.protocol.loopback import is_loopback
from kvstore.tiers import known_schemes

_P2P_KEYS: Final = {key for key in NOT_IMPLEMENTED if "p2p" in key or key in {"peer_init_ports", "peer_lookup_ports"}}
_OLDER_NAMES: Final = {
    "enable_nixl": "enable_pd",
    "enable_xpyd": "enable_pd",
    "nixl_role": "pd_role",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_port": "pd_peer_init_port",
    "nixl_receiver_port": "pd_peer_init_port",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
}
_ROLE_OPTIONS: Final = {"kv_producer": "producer", "kv_consumer": "consumer", "kv_both": "both"}
_PORT: Final = 7300
_OWN_KEYS: Final = {"server_key_file": "keys/server.key", "server_clients": "keys/clients"}
_PEER_KEYS: Final = {"remote_key_file": "keys/engine.key", "remote_server_key_file": "keys/server.pub"}
_SHARING: Final = "share a Redis (remote_url: redis://host:6379) or a cache server (kvs://host:port, kvstore serve)"
_BUCKET: Final = re.compile(r"s3://(?:[^/@]*@)?([a-z0-9][a-z0-9-]{1,61}[a-z0-9])(?=[./?]|$)")
_OTHERS: Final = {
    "fs": "a folder that several engines share is remote_url: file:///path here",
}


@dataclass
class Adapted:
    """Replacement of LMCache's keys.

    Attributes:
        settings: values of kvstore's keys, which override those of the file.
        recipes: manual steps, one line each.
        answered: keys that need no further warning.
    """

    settings: dict[str, object] = field(default_factory=dict)
    recipes: list[str] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)


def adapt(given: Mapping[str, object]) -> Adapted:
    """Convert the settings of an LMCache file for other engines and servers.

    Args:
        given: values of the file, unchanged.
    """
    adapted = Adapted()
    values = _with_newer_names(given, adapted)
    listens = _prefill_and_decode(values, adapted) if values.get("enable_pd") else False
    _remote(values, adapted, listens=listens)
    if values.get("enable_p2p"):
        _peer_to_peer(values, adapted, listens=listens)
    if adapted.settings.keys() & (_OWN_KEYS.keys() | _PEER_KEYS.keys()):
        adapted.recipes.append(
            "keys: other hosts need them: kvstore keygen --folder keys server, and kvstore keygen --folder keys engine "
            "for each engine; engine.pub goes into keys/clients of those who listen, server.pub to those who connect"
        )
    return adapted


def _with_newer_names(given: Mapping[str, object], adapted: Adapted) -> dict[str, object]:
    values = dict(given)
    for older, key in _OLDER_NAMES.items():
        if values.get(older) and key not in values:
            values[key] = values[older]
            adapted.answered.add(older)
            if key not in NOT_IMPLEMENTED:
                adapted.settings[key] = values[older]
    return values


def _prefill_and_decode(values: Mapping[str, object], adapted: Adapted) -> bool:
    """Convert the settings of disaggregated prefill, and return True if this engine listens."""
    role = PD_ROLES.get(str(values.get("pd_role")), "kv_both")
    named, port = values.get("pd_peer_host"), values.get("pd_peer_init_port")
    host = str(named or "127.0.0.1")
    receives = role != "kv_producer" or bool(values.get("pd_bidirectional"))
    if not receives and named:
        adapted.settings["pd_allowed_hosts"] = [host]  # a sender's file names the receiver
    elif not receives:
        adapted.recipes.append("pd_allowed_hosts: list the receivers on other hosts: nothing is sent to any other host")
    if not is_loopback(host):
        adapted.settings.update(_missing(values, _OWN_KEYS if receives else _PEER_KEYS))
    if receives and port is None:
        adapted.settings["pd_peer_init_port"] = _PORT
    adapted.recipes.append(f"pd_role: start this vLLM with what kvstore flags FILE --role {_ROLE_OPTIONS[role]} prints")
    proxies = [f"{key}_{part}" for key in ("pd_proxy", "nixl_proxy") for part in ("host", "port")]
    adapted.answered.update(proxies)
    old = one_line(str(values.get("pd_proxy_host") or ""))
    at = f" in place of the one at {old}" if old else ""
    adapted.recipes.append(f"proxy: kvstore proxy --prefill http://HOST:PORT --decode http://HOST:PORT{at}")
    return receives


def _remote(values: Mapping[str, object], adapted: Adapted, *, listens: bool) -> None:
    url = values.get("remote_url")
    scheme, mark, _ = str(url).partition("://")
    if isinstance(url, str) and scheme == "s3" and not listens and (bucket := _BUCKET.match(url)) is not None:
        adapted.settings["remote_url"] = f"s3://{bucket[1]}/kv"
        adapted.recipes.append(
            "remote_url: LMCache names a bucket by its host: check the bucket, and add ?region=... or ?endpoint=... ; "
            "credentials belong in the environment or in a credentials_file (docs/object.md)"
        )
        return
    if not isinstance(url, str) or not mark or scheme in known_schemes():
        return
    if listens:
        adapted.settings["remote_url"] = None
        adapted.recipes.append("remote_url: left out: this engine's own server takes its place")
    elif scheme == "lm" and (place := _place(url)) is not None:
        host, port = place
        address = f"kvs://{f'[{host}]' if ':' in host else host}:{port}"
        own = ""
        if not is_loopback(host):
            adapted.settings.update(_missing(values, _PEER_KEYS))
            own = ", server_key_file and server_clients"
        adapted.settings["remote_url"] = address
        adapted.recipes.append(
            f"remote_url: LMCache's server does not speak to kvstore: there, start kvstore serve --config server.yaml, "
            f"whose server.yaml has server_listen: {address}, max_local_cpu_size{own}"
        )
    else:
        generic = f"there is no {one_line(scheme)}:// here: {_SHARING}"
        adapted.settings["remote_url"] = None
        adapted.recipes.append(f"remote_url: {_OTHERS.get(scheme, generic)}")


def _peer_to_peer(values: Mapping[str, object], adapted: Adapted, *, listens: bool) -> None:
    adapted.answered |= _P2P_KEYS
    url = adapted.settings.get("remote_url", values.get("remote_url"))
    if url:
        adapted.recipes.append("enable_p2p: engines share what they compute through remote_url: nothing is left to do")
        return
    if not listens:
        host = str(values.get("p2p_host") or "127.0.0.1")
        ports = _ports(values.get("p2p_init_ports") or values.get("peer_init_ports"))
        adapted.settings |= {"enable_pd": True, "pd_peer_host": host, "pd_peer_init_port": ports}
        if not is_loopback(host):
            adapted.settings.update(_missing(values, _OWN_KEYS | _PEER_KEYS))
    adapted.recipes.append(
        "enable_p2p: no controller finds the others: list the first worker of each in peers: kvs://HOST:PORT, and "
        "start this vLLM with what kvstore flags FILE --role both prints"
    )


def _missing(values: Mapping[str, object], keys: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((key, path) for key, path in keys.items() if not values.get(key))


def _place(url: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return (host, port) if host and port else None


def _ports(given: object) -> object:
    """Return a port, or a list of ports by worker; other values are left to the check of the configuration."""
    if isinstance(given, str):
        given = [int(part) if part.strip().isdecimal() else part for part in given.split(",")]
    if isinstance(given, list) and len(given) == 1:
        return given[0]
    return given or _PORT
