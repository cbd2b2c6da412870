"""What a request says about the engines that share it: who computes its prompt, and who goes on. No vLLM types.

It comes from the client, or from a proxy between: nobody has checked it before, so anything may be in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from kvstore.errors import InvalidCallError
from kvstore.handover.transport import Receiver

_MAX_NAME: Final = 512
_MAX_RANKS: Final = 1024
_MAX_TOKENS: Final = 1 << 30
_DECODE_ADDRESS = re.compile(r"___decode_addr_(\[[0-9a-fA-F:.%]+\]|[^:/\s_][^:/\s]*):(\d{1,5})(?!\d)")


@dataclass(frozen=True)
class DisaggSpec:
    """Where the KV of a request goes. The names are LMCache's.

    Attributes:
        req_id: how the sender of the request calls it.
        receiver_host: where the engine that goes on takes KV.
        receiver_init_port: its port for each rank; if there is only one, rank 0's, and the others follow it.
        receiver_alloc_port: LMCache's second port: kept, and not used, as one port does both.
        is_last_prefill: whether the prompt is complete with this.
        num_transferred_tokens: how many tokens of the prompt were handed over.
    """

    req_id: str
    receiver_host: str
    receiver_init_port: tuple[int, ...]
    receiver_alloc_port: tuple[int, ...] = ()
    is_last_prefill: bool = False
    num_transferred_tokens: int = 0

    @property
    def receiver_id(self) -> str:
        """Names the receiver: its host, and the port of its first rank."""
        return f"{self.receiver_host}{self.receiver_init_port[0]}"

    def receiver(self, rank: int) -> Receiver:
        """Where a rank sends its part."""
        ports = self.receiver_init_port
        port = ports[0] + rank if len(ports) == 1 else ports[min(rank, len(ports) - 1)]
        return Receiver(self.receiver_host, port)

    def as_params(self) -> dict[str, object]:
        """As it stands in ``kv_transfer_params``: a list of a single port is written as a number."""
        fields = asdict(self)
        for name in ("receiver_init_port", "receiver_alloc_port"):
            ports = fields[name]
            fields[name] = ports[0] if len(ports) == 1 else list(ports)
        if not self.receiver_alloc_port:
            del fields["receiver_alloc_port"]
        return fields


@dataclass(frozen=True)
class Source:
    """An engine that has KV of a request's prompt, as it said in an earlier answer."""

    host: str
    port: int
    num_tokens: int

    @property
    def url(self) -> str:
        """Where it can be read; one spelling for one address."""
        return server_url(self.host.lower(), self.port)


@dataclass(frozen=True)
class Handover:
    """What one request says.

    Attributes:
        spec: where its KV goes.
        source: who has some of it.
        wants_first_token: let the answer name the first token that was sampled.
    """

    spec: DisaggSpec | None = None
    source: Source | None = None
    wants_first_token: bool = False


def parse_handover(params: object, request_id: str) -> Handover | None:
    """Read ``kv_transfer_params``, and addresses in the request's id; None if there is nothing of the kind.

    Raises:
        InvalidCallError: a field is wrong. The message names the field, and shows nothing of what was written.
    """
    fields = params if isinstance(params, Mapping) else {}
    given = fields.get("disagg_spec")
    spec = _spec(given, request_id) if given is not None else _spec_of_id(request_id)
    source = _source(fields) if fields.get("remote_host") is not None else None
    if spec is None and source is None:
        return None
    return Handover(spec, source, wants_first_token=fields.get("ret_first_tok") is True)


def _spec(given: object, request_id: str) -> DisaggSpec:
    if not isinstance(given, Mapping):
        raise InvalidCallError("disagg_spec must be a mapping of names to values")
    name = given.get("req_id")
    return DisaggSpec(
        req_id=_text("disagg_spec.req_id", request_id if name is None else name),
        receiver_host=_text("disagg_spec.receiver_host", given.get("receiver_host")),
        receiver_init_port=_ports("disagg_spec.receiver_init_port", given.get("receiver_init_port")),
        receiver_alloc_port=_ports("disagg_spec.receiver_alloc_port", given.get("receiver_alloc_port"), needed=False),
        is_last_prefill=given.get("is_last_prefill") is True,
        num_transferred_tokens=_number("disagg_spec.num_transferred_tokens", given.get("num_transferred_tokens") or 0),
    )


def _spec_of_id(request_id: str) -> DisaggSpec | None:
    """The address that follows ``___decode_addr_``, as proxies for vLLM's own peer-to-peer connectors write it."""
    found = _DECODE_ADDRESS.search(request_id)
    if found is None:
        return None
    return DisaggSpec(request_id, found[1].strip("[]"), _ports("the address in the request id", int(found[2])))


def _source(fields: Mapping[object, object]) -> Source:
    (port,) = _ports("remote_port", fields.get("remote_port"))[:1]
    return Source(
        _text("remote_host", fields.get("remote_host")), port, _number("num_tokens", fields.get("num_tokens"))
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise InvalidCallError(f"{name} must be text of 1 to {_MAX_NAME} characters")
    return value


def _ports(name: str, value: object, *, needed: bool = True) -> tuple[int, ...]:
    if value is None and not needed:
        return ()
    ports = value if isinstance(value, list | tuple) else [value]
    if not 0 < len(ports) <= _MAX_RANKS or not all(type(port) is int and 0 < port <= 65_535 for port in ports):
        raise InvalidCallError(f"{name} must be a port from 1 to 65535, or a list of one for each rank")
    return tuple(ports)


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_TOKENS:
        raise InvalidCallError(f"{name} must be a number of tokens")
    return value


def server_url(host: str, port: int) -> str:
    """The URL of a server on another host."""
    return f"kvs://[{host}]:{port}" if ":" in host else f"kvs://{host}:{port}"
