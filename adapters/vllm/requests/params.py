"""Fields of a request for the cache, and for the engines that share it.

Fields of the cache are called ``kvstore.<name>``, or ``lmcache.<name>`` as clients of LMCache write them;
docs/per-request.md lists them. Those of a hand-over are in ``kv_transfer_params`` under LMCache's names. All fields
come unchecked from clients or a proxy, so they may hold anything. No vLLM types.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from kvstore.config.schema import REQUEST_FIELDS
from kvstore.handover.transport import Receiver
from kvstore.model.errors import InvalidCallError

MAX_TAGS: Final = 16
MAX_TAG_CHARACTERS: Final = 256
MAX_TTL_S: Final = 365 * 86_400

_MAX_NAME: Final = 512
_MAX_RANKS: Final = 1024
_MAX_TOKENS: Final = 1 << 30
_OURS: Final = "kvstore."
_MAX_PORT: Final = 65_535
_LMCACHES: Final = "lmcache."
_TAG: Final = "tag."  # before a tag's own name
_TAGS: Final = "tag"
PROBE: Final = "probe"
"""Always counts, because it does no more than a tag, for a prompt that no other client sends."""
_NAMES: Final = (*(name for name in REQUEST_FIELDS if name != _TAGS), PROBE)
_Kind = TypeVar("_Kind")

HANDOVER_FIELD: Final = "handover"
OTHER_FIELD: Final = "other"
_DECODE_ADDRESS = re.compile(r"___decode_addr_(\[[0-9a-fA-F:.%]+\]|[^:/\s_][^:/\s]*):(\d{1,5})(?!\d)")


class FieldError(InvalidCallError):
    """Error for a wrong field of a request. The message names the field and quotes nothing that the client wrote.

    Attributes:
        field: the field, or the one that its name is nearest to: one of ``REQUEST_FIELDS``, ``PROBE``,
            ``HANDOVER_FIELD`` or ``OTHER_FIELD``.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def _flag(given: object) -> object:
    """Convert 1 and 0 to booleans, because vLLM turns those of ``vllm_xargs`` into numbers."""
    return bool(given) if isinstance(given, int | float) and given in (0, 1) else given


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError
    return text


def _ports(given: object) -> tuple[int, ...] | None:
    """Check all ports at once: pydantic would create an error for each, and a client's list may have millions."""
    if given is None:
        return None
    ports = given if isinstance(given, list | tuple) else (given,)
    if not 0 < len(ports) <= _MAX_RANKS or not all(type(port) is int and 0 < port <= _MAX_PORT for port in ports):
        raise ValueError
    return tuple(ports)


# Types of valid values; the descriptions end the messages about invalid ones.
_Flag = Annotated[bool, BeforeValidator(_flag), Field(description="true or false")]
_FlagOrNone = Annotated[bool | None, BeforeValidator(_flag), Field(description="true or false")]
_Seconds = Annotated[
    float | None, Field(gt=0, le=MAX_TTL_S, description=f"a number of seconds above 0 and up to {MAX_TTL_S}")
]
_SecondsOrZero = Annotated[
    float | None, Field(ge=0, le=MAX_TTL_S, description=f"a number of seconds from 0 to {MAX_TTL_S}")
]
_TagName = Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARACTERS)]
_TagValue = Annotated[str, Field(max_length=MAX_TAG_CHARACTERS)]
_Tags = Annotated[
    tuple[tuple[_TagName, _TagValue], ...],
    Field(
        max_length=MAX_TAGS,
        description=f"text of up to {MAX_TAG_CHARACTERS} characters, under a name of 1 to {MAX_TAG_CHARACTERS}; at "
        f"most {MAX_TAGS} tags are allowed",
    ),
]
_ProbeOrNone = Annotated[
    str | None,
    Field(min_length=1, max_length=MAX_TAG_CHARACTERS, description=f"text of 1 to {MAX_TAG_CHARACTERS} characters"),
]
_Text = Annotated[
    str,
    Field(min_length=1, max_length=_MAX_NAME, description=f"text of 1 to {_MAX_NAME} characters"),
    AfterValidator(_printable),
]
_TextOrNone = Annotated[_Text | None, Field(description=f"text of 1 to {_MAX_NAME} characters")]
_PortOrNone = Annotated[int | None, Field(gt=0, le=_MAX_PORT, description="a port from 1 to 65535")]
_FirstPort = Annotated[
    int,
    Field(gt=0, le=_MAX_PORT, description="a port from 1 to 65535"),
    BeforeValidator(lambda ports: ports[0] if isinstance(ports, list) and ports else ports),
]
_PORTS: Final = Field(description="a port from 1 to 65535, or a list of one for each rank")
_Ports = Annotated[tuple[int, ...], _PORTS, BeforeValidator(_ports)]
_PortsOrNone = Annotated[tuple[int, ...] | None, _PORTS, BeforeValidator(_ports)]
_Tokens = Annotated[int, Field(ge=0, le=_MAX_TOKENS, description="a number of tokens")]
_TokensOrNone = Annotated[int | None, Field(ge=0, le=_MAX_TOKENS, description="a number of tokens")]
_NumberOrNone = Annotated[int | None, Field(ge=0, le=1 << 62, description="a number")]
_NameOrNone = Annotated[str | None, Field(min_length=1, max_length=64, description="text of 1 to 64 characters")]
_STRICT = ConfigDict(strict=True)
_IN_SECONDS: Final = ("ttl", "retain", "prefetch")
_SHOWN: Final = {"tags": f"{_TAG}<name>", **{f"{name}_s": name for name in _IN_SECONDS}}  # what clients call a field


@dataclass(frozen=True, config=_STRICT)
class RequestParams:
    """Fields of one request for the cache.

    Attributes:
        skip_save: store nothing of it.
        max_save_tokens: store no more than its first tokens, in whole blocks; None for all of them.
        skip_load: compute it even if it is stored.
        ttl_s: the time for which its chunks may be found; None for as long as there is room.
        demote: its chunks on disk leave memory before others.
        drop: its conversation has ended, so its chunks go before others.
        retain_s: the time for which its chunks stay on disk, or 0 to end that; None for as long as there is room.
        prefetch_s: the time after its end when the conversation goes on; None if the client does not say.
        pin: True keeps its prompt's chunks from eviction, False ends that, None does neither.
        tags: (name, value) pairs, sorted, that another request must have, too, to share its KV.
        probe: a name that replaces its ``cache_salt`` in its key. vLLM's own cache uses the salt, so a prompt sent
            again with this name and another salt shows what the store has.
        ignored: names of its fields that do not count here.
    """

    skip_save: _Flag = False
    max_save_tokens: _TokensOrNone = None
    skip_load: _Flag = False
    ttl_s: _Seconds = None
    demote: _Flag = False
    drop: _Flag = False
    retain_s: _SecondsOrZero = None
    prefetch_s: _Seconds = None
    pin: _FlagOrNone = None
    tags: _Tags = ()
    probe: _ProbeOrNone = None
    ignored: tuple[str, ...] = ()


NO_PARAMS: Final = RequestParams()
WITHOUT_CACHE: Final = RequestParams(skip_save=True, skip_load=True)


@dataclass(frozen=True, config=_STRICT)
class DisaggSpec:
    """Destination of a request's KV. The names are LMCache's.

    Attributes:
        req_id: the request's id at its sender.
        receiver_host: the host at which the receiving engine takes KV, or several with commas, each for as many ranks.
        receiver_init_port: its port for each rank; if there is only one, rank 0's, and the others follow it.
        receiver_alloc_port: LMCache's second port: kept, and not used, as one port does both.
        is_last_prefill: True if the prompt is complete with this.
        num_transferred_tokens: leading tokens of the prompt that have arrived there.
        num_coming_tokens: leading tokens that have arrived or were still in transfer; None if unknown.
        sender: the sending engine's own name; None if it does not announce its transfers.
        handover: the number of the hand-over in these announcements.
        kept_host: the host from which chunks that do not arrive can be read; None without one.
        kept_port: rank 0's port there.
        kept_url: the tier from which chunks that do not arrive can be read; None without one.
    """

    req_id: _Text
    receiver_host: _Text
    receiver_init_port: _Ports
    receiver_alloc_port: _PortsOrNone = None
    is_last_prefill: Annotated[bool, BeforeValidator(lambda given: given is True)] = False
    num_transferred_tokens: _Tokens = 0
    num_coming_tokens: _TokensOrNone = None
    sender: _NameOrNone = None
    handover: _NumberOrNone = None
    kept_host: _TextOrNone = None
    kept_port: _PortOrNone = None
    kept_url: _TextOrNone = None

    @property
    def kept(self) -> Source | None:
        """The engine that keeps the chunks that do not arrive; None without one."""
        if self.kept_host is None or self.kept_port is None:
            return None
        return Source(self.kept_host, self.kept_port, max(self.num_transferred_tokens, self.num_coming_tokens or 0))

    @property
    def receiver_hosts(self) -> list[str]:
        """The hosts of ``receiver_host``."""
        return self.receiver_host.split(",")

    def receiver(self, rank: int) -> Receiver:
        """Return the address to which a rank sends its part."""
        ports = self.receiver_init_port
        number = min(rank, len(ports) - 1)
        host = self.receiver_hosts[number * len(self.receiver_hosts) // len(ports)]
        return Receiver(host, ports[0] + rank if len(ports) == 1 else ports[number])

    def as_params(self) -> dict[str, object]:
        """Return the fields for ``kv_transfer_params``, where a list of a single port is written as a number."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("receiver_init_port", "receiver_alloc_port"):
            if ports := fields.get(name):
                fields[name] = ports[0] if len(ports) == 1 else list(ports)
        return fields


@dataclass(frozen=True, config=_STRICT)
class Source:
    """An engine that has KV of a request's prompt, according to its earlier answer."""

    remote_host: _Text
    remote_port: _FirstPort
    num_tokens: _Tokens

    @property
    def url(self) -> str:
        """The URL of its server, with one spelling per address."""
        return server_url(self.remote_host.lower(), self.remote_port)


@dataclass(frozen=True)
class Handover:
    """Fields of one request about the engines that share it.

    Attributes:
        spec: the destination of its KV.
        source: the engine that has some of it.
        wants_first_token: let the answer name the first token that was sampled.
    """

    spec: DisaggSpec | None = None
    source: Source | None = None
    wants_first_token: bool = False


def parse_params(*sources: object, counted: Collection[str] = REQUEST_FIELDS) -> RequestParams:
    """Read mappings of field names to values, the weakest first. None is ignored as a source and as a value.

    Args:
        sources: as the request carries them.
        counted: those of ``REQUEST_FIELDS`` that count, in addition to ``PROBE``; the values of others are ignored.

    Raises:
        FieldError: a field is unknown or has a wrong value. The message names the field and quotes nothing that the
            client wrote.
    """
    fields = _fields(sources)
    if not fields:
        return NO_PARAMS
    asked: dict[str, object] = {}
    tags: list[tuple[str, object]] = []
    ignored: set[str] = set()
    for name, value in fields.items():
        kind = _TAGS if name.startswith(_TAG) else name
        if kind not in counted and kind != PROBE:
            ignored.add(kind)
        elif kind == _TAGS:
            tags.append((name.removeprefix(_TAG), value))
        else:
            asked[f"{name}_s" if name in _IN_SECONDS else name] = value
    few = tags[: MAX_TAGS + 1]  # one too many is enough to refuse all of them
    asked.update(tags=tuple(sorted(few, key=lambda tag: tag[0])), ignored=tuple(sorted(ignored)))
    return _checked(RequestParams, asked, _OURS)


def parse_handover(params: object, request_id: str) -> Handover | None:
    """Read ``kv_transfer_params``, and addresses in the request's id; None if neither names an engine.

    Raises:
        FieldError: a field is wrong. The message names the field and quotes nothing that was written.
    """
    fields = params if isinstance(params, Mapping) else {}
    given = fields.get("disagg_spec")
    spec = _spec_of_id(request_id) if given is None else _spec(given, request_id)
    source = _checked(Source, fields) if fields.get("remote_host") is not None else None
    if spec is None and source is None:
        return None
    return Handover(spec, source, wants_first_token=fields.get("ret_first_tok") is True)


def server_url(host: str, port: int) -> str:
    """Return the URL of a server on another host."""
    return f"kvs://[{host}]:{port}" if ":" in host else f"kvs://{host}:{port}"


def _spec(given: object, request_id: str) -> DisaggSpec:
    if not isinstance(given, Mapping):
        raise FieldError("disagg_spec must be a mapping of names to values", HANDOVER_FIELD)
    named = given if given.get("req_id") is not None else {**given, "req_id": request_id}
    return _checked(DisaggSpec, named, "disagg_spec.")


def _spec_of_id(request_id: str) -> DisaggSpec | None:
    """Return the address after ``___decode_addr_``, as proxies for vLLM's own peer-to-peer connectors write it."""
    found = _DECODE_ADDRESS.search(request_id)
    if found is None:
        return None
    address = {"req_id": request_id, "receiver_host": found[1].strip("[]"), "receiver_init_port": int(found[2])}
    return _checked(DisaggSpec, address, "the address in the request id: ")


def _checked(kind: type[_Kind], given: Mapping[Any, object], prefix: str = "") -> _Kind:
    """Read a dataclass from a mapping. None counts as no value, and other names in the mapping are ignored.

    Raises:
        FieldError: a value is wrong or missing.
    """
    build: Any = kind
    fields = build.__pydantic_fields__
    try:
        found: _Kind = build(**{name: given[name] for name in fields if given.get(name) is not None})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        field = {**_SHOWN, "tags": _TAGS}.get(name, name) if kind is RequestParams else HANDOVER_FIELD
        message = f"{prefix}{_SHOWN.get(name, name)} must be {fields[name].description}"
        raise FieldError(message, field) from None
    return found


def _fields(sources: tuple[object, ...]) -> dict[str, object]:
    """Return our fields by their name without prefix; where both prefixes give one, ours counts."""
    fields: dict[str, object] = {}
    for prefix in (_LMCACHES, _OURS):
        for source in sources:
            if source is None:
                continue
            if not isinstance(source, Mapping):
                raise FieldError("kv_transfer_params must be a mapping of names to values", OTHER_FIELD)
            for name, value in source.items():
                if isinstance(name, str) and name.startswith(prefix) and value is not None:
                    _take(fields, prefix, name.removeprefix(prefix), value)
    return fields


def _take(fields: dict[str, object], prefix: str, name: str, value: object) -> None:
    """Take one field. Other fields of LMCache are ignored, but an unknown name under our prefix is refused."""
    if name in _NAMES or name.startswith(_TAG):
        fields[name] = value
    elif prefix == _OURS:
        nearest = difflib.get_close_matches(name[:MAX_TAG_CHARACTERS], _NAMES, n=1)
        known = ", ".join((*_NAMES, f"{_TAG}<name>"))
        hint = f"did you mean {_OURS}{nearest[0]}?" if nearest else f"known names are {known}"
        message = f"unknown field {_OURS}<name>: {hint}"
        raise FieldError(message, nearest[0] if nearest else OTHER_FIELD)
