"""Parsers of what strangers write, each with valid samples, and with what its answers must fulfil.

A parser answers, or raises the one error that it documents. Whatever else it does with any bytes is a defect.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from kvstore.adapters.vllm.requests.params import parse_handover, parse_params
from kvstore.config import load_config
from kvstore.format import chunkfile, images, pack
from kvstore.model.chunks import ChunkRef
from kvstore.model.errors import ConfigError, InvalidCallError, ProtocolError
from kvstore.model.keys import ChunkKey, Namespace
from kvstore.model.layout import KVLayout
from kvstore.protocol import messages
from kvstore.protocol.hosts import is_on_each_host
from kvstore.protocol.payload import Geometry
from kvstore.server.options import parse_listen
from kvstore.tiers.members.addresses import parse_members
from kvstore.tiers.object import manifest
from kvstore.tiers.object.url import parse_target as parse_objects
from kvstore.tiers.redis.url import parse_target as parse_redis
from kvstore.tiers.server.url import parse_server
from kvstore.tools.proxy.listing import Receiver
from kvstore.tools.proxy.requests import Ask

LAYOUT: Final = KVLayout(page_bytes=(64, 32), planes=1, block_tokens=16, chunk_tokens=64)
NAMESPACE: Final = Namespace({"model": "parsed"})
REF: Final = ChunkRef(bytes(range(16)), 2)
KEY: Final = ChunkKey(NAMESPACE.id, REF.prefix_key)
MAX_BYTES: Final = 1 << 14
TOKENS: Final = (
    *(b"Infinity", b"-Infinity", b"NaN", b"1e999", b"-1", b"null", b"true", b"[]", b"{}", b"9" * 20, b"\\ud800"),
    *(b'"until_s"', b'"layer_bytes"', b'"seal"', b'"codec"', b'"lz4"', b'"none"', b'"xxh3_64"', b'"page_bytes"'),
    *(b"kvs://", b"redis://", b"s3://", b"file://", b"[::1]", b"%00", b"?", b"&", b",", b":0", b"@", b"#", b"//"),
    *(b"kvstore.", b"lmcache.", b"tag.", b"!!", b"&a", b"*a", b"<<: ", b"? ", b"0b_", b"\xff", b"\0"),
)
"""Words that mean something to a parser; a fuzzer inserts them."""

_VALUE: Final = re.compile(rb'"[^"]*"|-?[0-9]+|[a-z]+')  # of JSON, YAML or a URL


class Parser(NamedTuple):
    """One parser.

    Attributes:
        name: on the command line.
        samples: what it accepts.
        parse: raises for any bytes whose treatment is a defect; True if they were accepted.
        rooms: packages of ours that it uses, whose branches a fuzzer watches.
    """

    name: str
    samples: Callable[[], Sequence[bytes]]
    parse: Callable[[bytes], bool]
    rooms: Sequence[str]


def mutated(samples: Sequence[bytes], dice: random.Random) -> bytes:
    """Return a sample with a few changes: bytes, cuts, repetitions, words, parts of another sample."""
    data = bytearray(dice.choice(samples))
    for _ in range(1 + dice.randrange(4)):
        at = dice.randrange(len(data) + 1)
        end = min(len(data), at + dice.randrange(1, 30))
        kind = dice.randrange(7)
        found = _VALUE.search(data, at) if kind == 6 else None
        if found is not None:
            data[slice(*found.span())] = dice.choice(TOKENS)
        elif kind == 0 and at < len(data):
            data[at] = dice.randrange(256)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end] * dice.randrange(1, 4)
        elif kind == 3:
            data[at:end] = dice.choice(TOKENS)
        elif kind == 4:
            data[at:at] = dice.choice(TOKENS)
        else:
            data[at:] = dice.choice(samples)[at:]
    return bytes(data[:MAX_BYTES])


def _image(end_s: int | None = None) -> bytes:
    payload = np.zeros(chunkfile.body_bytes(LAYOUT, REF.num_blocks), np.uint8)
    size = LAYOUT.payload_bytes(REF.num_blocks)
    payload[:size] = np.arange(size, dtype=np.uint8)
    sums = chunkfile.checksums(LAYOUT, REF.num_blocks, payload)
    return chunkfile.build_header(LAYOUT, KEY, REF.num_blocks, sums, end_s=end_s) + payload.tobytes()


def _coded_image(codec: str, seal: str = "") -> bytes:
    layers = [b"first layer", b"second"]
    tags = [layer + bytes(chunkfile.TAG_BYTES if seal else 0) for layer in layers]
    encoding = chunkfile.Encoding(codec, tuple(map(len, tags)), seal)
    sums = "".join(xxhash.xxh3_64_hexdigest(layer) for layer in tags)
    header = chunkfile.build_header(LAYOUT, KEY, REF.num_blocks, sums, encoding=encoding)
    return header + b"".join(tags).ljust(4096, b"\0")


# A header's padding is left out of the samples, and added again, so that changes hit what means something.


def _trimmed(image: bytes) -> bytes:
    size = chunkfile.header_bytes(LAYOUT)
    return image[:size].rstrip(b" ") + b"\n" + image[size:].rstrip(b"\0")


def _images() -> list[bytes]:
    sealed = chunkfile.sealed_name("lz4")
    whole = [_image(), _image(2_000_000_000), _coded_image("lz4"), _coded_image(sealed, "0123456789abcdef 1")]
    return [_trimmed(image) for image in whole]


def _parse_image(data: bytes) -> bool:
    head, _, body = data.partition(b"\n")
    header = head.ljust(chunkfile.header_bytes(LAYOUT))
    image = np.frombuffer(header + body.ljust(4096, b"\0"), np.uint8)
    found = image[: chunkfile.header_bytes(LAYOUT)]
    chunkfile.end_of(found, KEY)
    chunkfile.seal_of(found)
    facts = images.read_facts(bytes(found))
    if facts is not None:
        images.infer_layout([facts])
    for codec in ("none", "lz4", "zstd", chunkfile.sealed_name("lz4"), chunkfile.sealed_name("none")):
        chunkfile.parse_encoding(LAYOUT, REF.num_blocks, found, codec)
    for layers in (None, range(1)):
        chunkfile.compare(LAYOUT, KEY, REF.num_blocks, found, "0" * 16, layers=layers)
    chunkfile.parse_chunk_name("00", head[:80].decode("latin-1"))
    if images.check_image(LAYOUT, KEY, REF.num_blocks, image) is not None:
        return False
    if chunkfile.codec_in(LAYOUT, image) == "none":
        end_s = chunkfile.end_of(found, KEY)
        size = LAYOUT.payload_bytes(REF.num_blocks)
        rebuilt = chunkfile.build_header(
            LAYOUT, KEY, REF.num_blocks, chunkfile.checksums(LAYOUT, REF.num_blocks, image[4096:]), end_s=end_s
        )
        assert bytes(found) == rebuilt, "a header with a free choice of bytes was accepted"
        assert size <= len(image) - 4096
    return True


def _file() -> Path:
    """Return the path of a file in memory, of this process alone."""
    return Path(f"/dev/shm/kvstore-parsed-{os.getpid()}")


def _packs() -> list[bytes]:
    shards = [pack.Shard(NAMESPACE, LAYOUT), pack.Shard(Namespace({"model": "other"}), LAYOUT, ("a", "b"))]
    path, whole = _file(), []
    for trails in ((), (bytes(16) + REF.prefix_key,)):
        try:
            with pack.PackWriter(path, shards) as writer:
                writer.add(0, REF, np.frombuffer(_image(), np.uint8))
                writer.finish(trails)
            whole.append(path.read_bytes())
        finally:
            path.unlink(missing_ok=True)
    return whole


def _parse_pack(data: bytes) -> bool:
    """Open the bytes as a pack, as they are and with the checksum of the index made right."""
    path = _file()
    try:
        return [_opens(path, content) for content in (data, _summed(data))][-1]
    finally:
        path.unlink(missing_ok=True)


def _opens(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        opened = pack.open_pack(path)
    except ConfigError:
        return False
    with opened:
        opened.describe()
        opened.read_trails()
        for shard, extents in enumerate(opened.extents):
            for ref in list(extents)[:8]:
                opened.check(shard, ref)
    return True


def _summed(data: bytes) -> bytes:
    """Return a pack's bytes with the right checksum at their end, if they are long enough to have one."""
    end_bytes, front = 8 + 8 + 8 + 16, int.from_bytes(data[8:16], "little")
    begin = int.from_bytes(data[-end_bytes + 8 : -end_bytes + 16], "little")
    front_bytes = -(-(16 + front) // 4096) * 4096
    if len(data) < end_bytes or not front_bytes <= begin <= len(data) - end_bytes:
        return data
    digest = xxhash.xxh3_128_digest(data[:front_bytes] + data[begin:-end_bytes])
    return data[:-16] + digest


def _messages() -> list[bytes]:
    refs, trail = messages.pack_refs([REF]), bytes(16) + REF.prefix_key
    geometry = Geometry.of(LAYOUT)
    sent: list[messages.Request] = [
        messages.Hello(1, messages.PROTOCOL_VERSION, {"model": "m", "n": 1}, geometry, 0, bytes(16)),
        messages.Lookup(2, refs),
        messages.ReserveFor(3, refs, bytes(16)),
        messages.Commit(4, [1, 2], True),
        messages.Piece(5, 1, 0, bytes(8)),
        messages.Attach(6, "tcp", b"description"),
        messages.Offer(7, 1, 0, 9, 0, bytes(8)),
        messages.Front(8, 1, 2, 0, 9),
        messages.Sending(9, "me", 9, [(8, 32)]),
        messages.Pin(10, bytes(8), refs, True, 60),
        messages.Nearest(11, [trail]),
        messages.Prolong(12, refs, [1000]),
        messages.Ask(13, refs),
    ]
    answers: list[messages.Answer] = [
        messages.Welcome(1, 2, messages.NO_USAGE),
        messages.Held(2, b"\1", messages.NO_USAGE),
        messages.Lasting(3, b"\1", messages.NO_USAGE, [1000]),
        messages.Granted(4, [messages.Grant(1, 1, ((0, 1),))], messages.NO_USAGE),
        messages.Refused(3, messages.Refusal.LIMIT, "too much"),
    ]
    return [b"q" + messages.encode(message) for message in sent] + [b"a" + messages.encode(one) for one in answers]


def _parse_message(data: bytes) -> bool:
    decode = messages.decode_answer if data[:1] == b"a" else messages.decode_request
    try:
        message: Any = decode(data[1:])
        again: Any = decode(messages.encode(message))
        assert again == message, f"{message} is {again} when it is sent on"
        if isinstance(refs := getattr(message, "refs", None), bytes):
            messages.unpack_refs(refs)
        if isinstance(message, messages.Hello):
            message.geometry.layout()
    except ProtocolError:
        return False
    return True


def _manifests() -> list[bytes]:
    name = np.array([manifest.name_of(REF)], manifest.NAME_TYPE)
    used_s = np.array([5], np.uint32)
    ends = np.array([[9, 9]], np.uint32)
    trail = bytes(16) + REF.prefix_key
    whole = manifest.Manifest(name, used_s, name, name, frozenset(["0" * 8]), (trail,), ends)
    return [manifest.Manifest().encode()[:-8], whole.encode()[:-8], manifest.Manifest(name, used_s).encode()[:-8]]


def _parse_manifest(data: bytes) -> bool:
    """Decode the bytes as they are, and with the right checksum behind them."""
    manifest.decode(data)
    found = manifest.decode(data + xxhash.xxh3_64_digest(data))
    if found is None:
        return False
    for name in found.stored:
        manifest.ref_of(name)
    return True


def _configurations() -> list[bytes]:
    text = (
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 20.0\nlocal_disk: /mnt/kv\nmax_local_disk_size: 5.0\n"
        "remote_url: redis://:s3cret@h:6379/0?timeout_s=1\nextra_config:\n  a: [1, {b: c}]\n"
    )
    listed = "server_listen: kvs+ipc:///run/kv, kvs://127.0.0.1:1\nrequest_fields: [pin, ttl]\n"
    extra = {"kvstore.chunk_size": 256, "kvstore.remote_url": "redis://h:1?ttl_s=5", "kv_port": 1, "other": [1]}
    return [text.encode(), listed.encode(), json.dumps(extra).encode()]


def _parse_configuration(data: bytes) -> bool:
    """Load the bytes as vLLM's extra config if they are an object of JSON, otherwise as a file."""
    tree = _json(data)
    path = _file()
    try:
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            if isinstance(tree, dict):
                load_config(tree, environ={}, log_warnings=False)
            else:
                load_config(None, path=path, environ={}, log_warnings=False)
            return True
    finally:
        path.unlink(missing_ok=True)
    return False


def _fields() -> list[bytes]:
    spec = {"receiver_host": "h", "receiver_init_port": [1, 2], "req_id": "a", "num_transferred_tokens": 9}
    trees: list[dict[str, object]] = [
        {"kvstore.ttl": 60, "kvstore.tag.team": "red", "lmcache.skip_save": 1, "kvstore.retain": 5.5},
        {"kvstore.max_save_tokens": 9, "kvstore.probe": "a", "kvstore.pin": True, "kvstore.prefetch": 1},
        {"disagg_spec": spec, "ret_first_tok": True},
        {"remote_host": "[::1]", "remote_port": 7, "num_tokens": 5},
        {"id": "cmpl___decode_addr_10.0.0.1:5001"},
    ]
    return [json.dumps(tree).encode() for tree in trees]


def _parse_fields(data: bytes) -> bool:
    tree = _json(data)
    is_sound = True
    for parse in (lambda: parse_params(tree), lambda: parse_handover(tree, _id_of(tree))):
        try:
            parse()
        except InvalidCallError as error:
            is_sound = False
            assert len(str(error)) < 400, "the message quotes what was written"  # noqa: PT017 - of any input
    return is_sound


def _id_of(tree: object) -> str:
    given = tree.get("id") if isinstance(tree, dict) else None
    return given if isinstance(given, str) else "cmpl-1"


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


_URLS: Final[Sequence[tuple[bytes, Callable[[str], object]]]] = (
    (b"redis://me:p%40ss@here:7/3?timeout_s=0.5&tls_check_hostname=no", lambda url: parse_redis(url, {})),
    (b"redis-sentinel://one,two:7/chunks/4", lambda url: parse_redis(url, {})),
    (b"unix://me:secret@/run/redis.sock?db=2", lambda url: parse_redis(url, {})),
    (b"s3://bucket/prefix?endpoint=http://[::1]:9&region=x", lambda url: parse_objects(url, {})),
    (b"file:///mnt/kv%20a", lambda url: parse_objects(url, {})),
    (b"kvs://[::1]:5566?timeout_s=2", lambda url: parse_server(url, {})),
    (b"kvs+ipc:///run/kv", lambda url: parse_server(url, {})),
    (b"kvs://a:1,[::1]:2", parse_members),
    (b"kvs+srv://_kv._tcp.name?nameserver=127.0.0.1:5", parse_members),
    (b"kvs+file:///etc/members", parse_members),
    (b"kvs://h-1,[fd00::2]:7,8,9,10", Receiver.parse),
    (b"kvs://127.0.0.1:5566", lambda url: parse_listen(tuple(url.split(" ")))),
)


def _urls() -> list[bytes]:
    return [bytes([number]) + url for number, (url, _) in enumerate(_URLS)]


def _parse_url(data: bytes) -> bool:
    text = data[1:].decode("utf-8", "surrogateescape")
    _, parse = _URLS[data[0] % len(_URLS)] if data else _URLS[0]
    is_on_each_host(text)
    try:
        parse(text)
    except ConfigError:
        return False
    return True


def _bodies() -> list[bytes]:
    return [
        b'{"model": "m", "prompt": [1, 2], "stream":true, "max_tokens":7, "stream_options": {"include_usage": true}}',
        b'{"messages": [{"role": "user", "content": "\\u00e4"}], "n": 1, "kv_transfer_params": {"kvstore.pin": 1}}',
    ]


def _parse_body(data: bytes) -> bool:
    try:
        ask = Ask.parse(data)
        for parts in (ask.for_prefill(None, "t"), ask.for_decode(None, counted=True), ask.retaining().beginnings("")):
            list(parts)
    except InvalidCallError:
        return False
    return True


PARSERS: Final = (
    Parser("header", _images, _parse_image, ("kvstore.format",)),
    Parser("pack", _packs, _parse_pack, ("kvstore.format", "kvstore.model")),
    Parser("wire", _messages, _parse_message, ("kvstore.protocol", "kvstore.model")),
    Parser("manifest", _manifests, _parse_manifest, ("kvstore.tiers.object",)),
    Parser("configuration", _configurations, _parse_configuration, ("kvstore.config",)),
    Parser("params", _fields, _parse_fields, ("kvstore.adapters.vllm.requests",)),
    Parser("url", _urls, _parse_url, ("kvstore.tiers", "kvstore.server.options", "kvstore.tools.proxy.listing")),
    Parser("body", _bodies, _parse_body, ("kvstore.tools.proxy",)),
)
