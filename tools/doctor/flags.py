"""Checks of the flags of ``vllm serve`` alone: the use of kvstore, its role and its failure policy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvstore.adapters.vllm.flag import CONNECTOR_MODULE, CONNECTOR_NAME, TRANSFER_FLAG
from kvstore.config.schema import PD_ROLES
from kvstore.tools.doctor.findings import Finding
from kvstore.tools.vllmflags import ServeFlags

FIELDS: Final = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
    "kv_buffer_size",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
)
"""Fields of vLLM's ``KVTransferConfig``, in any known version."""

_MIN_LIKENESS: Final = 0.85  # high, because the names of other connectors have the same end
_EXTRA: Final = "kv_connector_extra_config"
_SEVERAL: Final = "MultiConnector"
_PRINTS: Final = "kvstore flags prints what to pass"


def check_flags(flags: ServeFlags) -> Iterator[Finding]:
    """Check that vLLM would load the connector, with a valid role and failure policy."""
    for problem in flags.problems:
        yield Finding("flags", "error", problem, f"correct it; {_PRINTS}")
    if "--kv-offloading-size" in flags.given:
        found = "--kv-offloading-size makes vLLM use its own connector in place of the one that is named"
        yield Finding("connector", "error", found, "leave --kv-offloading-size out")
    if flags.transfer is None:
        if not any(problem.startswith(TRANSFER_FLAG) for problem in flags.problems):
            yield Finding("connector", "error", f"no {TRANSFER_FLAG}: vLLM would start without kvstore", _PRINTS)
        return
    for name in flags.transfer.keys() - set(FIELDS):
        near = next(iter(difflib.get_close_matches(name, FIELDS, 1)), "one of " + ", ".join(FIELDS[:6]))
        yield Finding("flags", "error", f"{TRANSFER_FLAG} has no field {name!r}", f"write {near}; {_PRINTS}")
    ours = our_part(flags.transfer)
    if ours is None:
        yield _other_connector(flags.transfer)
        return
    yield from _loaded(flags.transfer, ours)
    yield _role(ours)
    yield from _policy(flags.transfer, ours)


def our_part(transfer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings of our connector, alone or in a MultiConnector, even if misspelt; None if there are none."""
    if transfer.get("kv_connector") != _SEVERAL:
        return transfer if _is_meant(transfer) else None
    return next(filter(_is_meant, _parts(transfer)), None)


def extra_config(transfer: Mapping[str, Any] | None) -> Mapping[str, object]:
    """Return kvstore's keys in the flags."""
    extra = ((transfer and our_part(transfer)) or {}).get(_EXTRA)
    return extra if isinstance(extra, dict) else {}


def _is_meant(part: Mapping[str, Any]) -> bool:
    name = str(part.get("kv_connector")).lower()
    return difflib.SequenceMatcher(None, name, CONNECTOR_NAME.lower()).ratio() >= _MIN_LIKENESS


def _parts(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    extra = transfer.get(_EXTRA)
    parts = extra.get("connectors") if isinstance(extra, dict) else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _other_connector(transfer: Mapping[str, Any]) -> Finding:
    name = transfer.get("kv_connector")
    if name is None:
        return Finding("connector", "error", "kv_connector is not given: vLLM would start without kvstore", _PRINTS)
    if name == _SEVERAL:
        found = f"none of the connectors in {_SEVERAL} is {CONNECTOR_NAME}"
        return Finding("connector", "error", found, "put it first among them: see docs/per-request.md")
    return Finding("connector", "error", f"kv_connector is {name!r}, which is not kvstore", f"write {CONNECTOR_NAME}")


def _loaded(transfer: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Finding]:
    name, plugins, path = ours["kv_connector"], os.environ.get("VLLM_PLUGINS"), ours.get("kv_connector_module_path")
    if name != CONNECTOR_NAME:
        found = f"kv_connector is {name!r}: vLLM knows no such connector"
        yield Finding("connector", "error", found, f"write {CONNECTOR_NAME}")
    elif path is not None and path != CONNECTOR_MODULE:
        yield Finding("connector", "error", f"kv_connector_module_path is {path!r}", "leave it out: vLLM finds kvstore")
    elif path is None and plugins is not None and "kvstore" not in plugins.split(","):
        found = f"VLLM_PLUGINS={plugins} keeps vLLM from finding kvstore"
        yield Finding("connector", "error", found, "unset VLLM_PLUGINS, or add kvstore to it")
    elif ours is not transfer and ours is not _parts(transfer)[0]:
        found = f"not the first of the connectors in {_SEVERAL}: nothing would be cached"
        yield Finding("connector", "error", found, "put it first: see docs/per-request.md")
    elif not isinstance(ours.get(_EXTRA, {}), dict):
        found = f"{_EXTRA} is no object"
        yield Finding("connector", "error", found, f'write {{"kvstore.chunk_size": 256}}; {_PRINTS}')
    else:
        yield Finding("connector", "ok", CONNECTOR_NAME)


def _role(ours: Mapping[str, Any]) -> Finding:
    role = ours.get("kv_role")
    if role not in PD_ROLES.values():
        found = "kv_role is not given" if role is None else f"kv_role is {role!r}"
        return Finding(
            "role", "error", f"{found}: vLLM would not start", f"write one of {', '.join(PD_ROLES.values())}"
        )
    does = {"kv_both": "stores and loads", "kv_producer": "stores only", "kv_consumer": "loads only"}
    return Finding("role", "ok", f"{role}: {does[str(role)]}")


def _policy(transfer: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Finding]:
    if ours.get("kv_role") == "kv_producer":
        return  # it loads nothing
    for part in [ours] if ours is transfer else [transfer, ours]:
        policy = part.get("kv_load_failure_policy", "fail")
        if policy != "recompute":
            found = f'kv_load_failure_policy is "{policy}": a chunk that cannot be loaded would end its request'
            yield Finding("policy", "error", found, 'add "kv_load_failure_policy":"recompute"')
            return
    yield Finding("policy", "ok", "what cannot be loaded is computed")
