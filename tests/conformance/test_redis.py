"""Tests of the redis tier's contract with single servers, users, TLS, Sentinel and clusters."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from support.disk_files import let_some_shrink
from support.redis_server import (
    ACL_USER,
    RedisServer,
    make_certificates,
    running,
    start_cluster,
    start_sentinel,
    tls_options,
)

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import Namespace
from kvstore.model.layout import KVLayout
from kvstore.testing import MINE, TierConformance
from kvstore.testing.harness import ODD, make_buffer, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.guards import GuardOptions, guarded, layers
from kvstore.tiers.redis.chunk import WRITE_ID_BYTES
from kvstore.tiers.redis.names import PREFIX, Home
from kvstore.tiers.redis.tier import RedisTier

HANG_GUARD_S = 60.0


class Redis(TierConformance):
    """Base of the tests here: raw access to the storage through a separate client."""

    persistent = True
    keeps_trails = True
    checks_bytes = True
    options: ClassVar[dict[str, object]] = {}
    admins: ClassVar[list[Any]]
    _last_folder: Path | None = None

    def open_tier(self, setup: TierSetup) -> Tier:
        if self.folder != self._last_folder:  # a new harness begins with an empty storage
            for admin in self.admins:
                admin.flushall()
            self._last_folder = self.folder
        return RedisTier.open(self.with_options(setup, **self.options))

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        found = self.values(ref)
        return b"".join(value for _, _, value in found) if found else None

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        found = self.values(ref)
        for number, (admin, key, old) in enumerate(found):
            end = len(old) if number + 1 < len(found) else len(value)
            admin.set(key, value[:end])
            value = value[end:]

    def raw_remove(self, ref: ChunkRef) -> None:
        for admin, key, _ in self.values(ref):
            admin.delete(key)

    def raw_used_bytes(self) -> int:
        """Sum up the bytes of all namespaces, because after a reset the tier is in another one."""
        return sum(len(admin.get(key)) for admin, key in self.all_keys())

    def all_keys(self) -> list[tuple[Any, bytes]]:
        """Return the keys of all chunks, each with a client of its server."""
        found = ((admin, key) for admin in self.admins for key in admin.scan_iter("kvs:*", 1000))
        return [(admin, key) for admin, key in found if not key.endswith((b":epoch", b"}:t"))]

    def redis_tier(self) -> RedisTier:
        *_, tier = layers(self.tier)
        assert isinstance(tier, RedisTier)
        return tier

    def check_bytes(self) -> None:
        """Check that every chunk held has its commit and at least one part, and that no other key is left."""
        tier = self.redis_tier()
        expected = [tier._io.keys(tier._home, ref) for ref in self.held()]
        there = {key for _, key in self.all_keys()}
        assert there <= {key for keys in expected for key in keys}
        assert all({commit, first} <= there for commit, first, *_ in expected)

    def test_the_padding_is_not_part_of_the_chunk(self) -> None:
        """Equal payloads are stored as equal bytes, except for the ids of the writes."""
        tier = self.start(ODD)
        ref, buffer, *_ = make_transfer(ODD, make_ref(7, 1))
        values = []
        for filling in (0, 0x3C):
            buffer[ODD.payload_bytes(1) :] = filling
            tier.put([Transfer(ref, buffer)])
            values.append([value[WRITE_ID_BYTES:] for _, _, value in self.values(ref)])
        assert values[0] == values[1]
        assert len(values[0]) == 2

    def values(self, ref: ChunkRef) -> list[tuple[Any, bytes, bytes]]:
        """Return client, key and value of all keys of a chunk, the commit first."""
        # Globs have no braces, and the epoch does not matter.
        pattern = f"{PREFIX.decode()}{MINE.id.hex()}:*:{ref.prefix_key.hex()}:{ref.num_blocks}}}:*"
        found = [(admin, key) for admin in self.admins for key in admin.scan_iter(pattern, 1000)]
        found.sort(key=lambda item: (not item[1].endswith(b"}:c"), item[1]))
        return [(admin, key, admin.get(key)) for admin, key in found]


def serve(cls: type[Redis], *servers: RedisServer, url: str, **options: object) -> Iterator[None]:
    with running(*servers):
        cls.admins = [server.admin() for server in servers]
        cls.options = {"url": url, **options}
        yield


class TestTcp(Redis):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield from serve(cls, server, url=f"redis://127.0.0.1:{server.port}")

    def test_golden_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The bytes are those of docs/FORMAT.md. A change needs a new version there, and makes old chunks misses."""
        monkeypatch.setattr("secrets.token_bytes", lambda _: bytes(range(1, 9)))
        admin = self.admins[0]
        admin.flushall()
        admin.set("kvs:{76b06e0a5a6b2136}:epoch", "00112233445566ff")
        namespace = Namespace({"model": "example", "layout": "demo", "chunk_tokens": 4})
        layout = KVLayout(page_bytes=(4, 8), planes=1, block_tokens=2, chunk_tokens=4)
        tier = RedisTier.open(self.with_options(TierSetup(namespace, layout, UNBOUNDED_BYTES), **self.options))
        buffer = make_buffer(4096)
        buffer[:24] = range(24)
        ref = ChunkRef(bytes.fromhex("d0549f4f41c632608cec3efe897712b0"), 2)
        trail = bytes.fromhex("1f") * 16 + ref.prefix_key
        assert tier.put([Transfer(ref, buffer, trail=trail)]) == [Outcome.STORED]
        tag = "kvs:{76b06e0a5a6b2136:00112233445566ff:d0549f4f41c632608cec3efe897712b0:2}"
        header = (
            b'{"__metadata__":{"format_version":"1","namespace":"76b06e0a5a6b2136",'
            b'"prefix_key":"d0549f4f41c632608cec3efe897712b0","tokens":"4","blocks":"2","codec":"none",'
            b'"xxh3_64":"3a1c2d7c85af88f88c52cdbb503f90e1"},'
            b'"kv":{"dtype":"U8","shape":[24],"data_offsets":[0,24]},'
            b'"_pad":{"dtype":"U8","shape":[4072],"data_offsets":[24,4096]}}'
        )
        write_id = bytes.fromhex("0102030405060708")
        trails = b"kvs:{76b06e0a5a6b2136:00112233445566ff:0f:0}:t"
        assert admin.zrange(trails, 0, -1, withscores=True) == [(trail, 0.0)]
        assert {key: admin.get(key) for key in admin.scan_iter() if key != trails} == {
            b"kvs:{76b06e0a5a6b2136}:epoch": b"00112233445566ff",
            f"{tag}:c".encode(): write_id + bytes.fromhex("f80f000000000000") + header,
            f"{tag}:0".encode(): write_id + bytes(range(24)),
        }
        assert tier.counters.bytes_written == 16 + 8 + len(header) + 24
        tier.close()

    def test_of_two_resets_at_once_each_sweeps_what_it_leaves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunks stored between the two are in a namespace that is unknown afterwards."""
        self.start()
        tier = self.redis_tier()
        enter = tier._enter

        def enter_later(home: Home, instead_of: Home | None = None) -> Home:
            monkeypatch.undo()
            tier.reset(Namespace({"model": "the other's"}))
            assert self.put(make_ref(1)) == [Outcome.STORED]
            return enter(home, instead_of)

        monkeypatch.setattr(tier, "_enter", enter_later)
        tier.reset(Namespace({"model": "mine"}))
        assert self.raw_used_bytes() == 0

    @pytest.mark.parametrize("name", ["get", "put", "remove"])
    def test_a_call_of_the_old_epoch_leaves_alone_what_is_in_the_new_one(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """The clear and a new put come between the call's look at the epoch and its look at the chunk."""
        self.start()
        tier, ref = self.redis_tier(), make_ref(1)
        call: dict[str, Callable[[], object]] = {
            "get": lambda: self.get(ref),
            "put": lambda: self.put(ref),
            "remove": lambda: tier.remove([ref]),
        }
        self.put(ref)
        current_home = tier._current_home

        def then_clear() -> Home:
            home = current_home()
            monkeypatch.undo()
            tier.clear()
            assert self.put(ref) == [Outcome.STORED]
            return home

        monkeypatch.setattr(tier, "_current_home", then_clear)
        call[name]()
        assert self.get(ref) == [Outcome.HIT]
        self.check_bytes()


@pytest.mark.sweep
class TestTcpWithLz4(Redis):
    """Chunks through a codec, of which some shrink to a fraction, and others not at all."""

    exact_sizes = False
    codec: ClassVar[str] = "lz4"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield from serve(cls, server, url=f"redis://127.0.0.1:{server.port}", codec=cls.codec)

    @pytest.fixture(autouse=True)
    def _payloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        let_some_shrink(monkeypatch)

    def open_tier(self, setup: TierSetup) -> Tier:
        return super().open_tier(replace(setup, layout=replace(setup.layout, element="bf16")))


@pytest.mark.sweep
class TestTcpWithSplit(TestTcpWithLz4):
    codec = "split"


@pytest.mark.sweep
class TestUnixSocket(Redis):
    """Server on a unix socket, with a separate database."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        with running(server):
            cls.admins = [server.admin(db=3)]
            cls.options = {"url": f"unix://{server.unix_path}?db=3"}
            yield


@pytest.mark.sweep
class TestAclUser(Redis):
    """User with the least rights, and the password outside the URL."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = RedisServer(tmp_path_factory.mktemp("redis"), [ACL_USER])
        url = f"redis://kvstore@127.0.0.1:{server.port}"
        yield from serve(cls, server, url=url, password="s3cret")

    def test_the_user_can_do_no_more(self) -> None:
        user: Any = redis.Redis(
            port=int(str(self.options["url"]).rsplit(":", 1)[1]), username="kvstore", password="s3cret"
        )
        for command in (("SET", "other", "x"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)
        user.close()


class TestTls(Redis):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("redis")
        files = make_certificates(folder / "certificates")
        server = RedisServer(folder / "server", tls_options(files), tls=True)
        url = f"rediss://127.0.0.1:{server.port}?tls_ca={files['ca.crt']}"
        with pytest.MonkeyPatch.context() as patch:
            # Each connection would read all authorities of this system, and ask none of them.
            patch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: None)
            yield from serve(cls, server, url=url, tls_cert=str(files["client.crt"]), tls_key=str(files["client.key"]))


@pytest.mark.sweep
class TestSentinel(Redis):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = tmp_path_factory.mktemp("redis")
        master = RedisServer(folder / "master")
        with running(master):
            sentinel = start_sentinel(folder / "sentinel", master)
            try:
                cls.admins = [master.admin()]
                cls.options = {"url": f"redis-sentinel://127.0.0.1:{sentinel.port}/chunks"}
                yield
            finally:
                sentinel.kill()


class TestCluster(Redis):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        servers = start_cluster(tmp_path_factory.mktemp("redis"))
        try:
            cls.admins = [server.admin() for server in servers]
            cls.options = {"url": f"redis-cluster://127.0.0.1:{servers[0].port},127.0.0.1:{servers[1].port}"}
            yield
        finally:
            for server in servers:
                server.kill()


@pytest.mark.sweep
class TestGuarded(Redis):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield from serve(cls, server, url=f"redis://127.0.0.1:{server.port}")

    def open_tier(self, setup: TierSetup) -> Tier:
        return guarded(super().open_tier(setup), GuardOptions(timeout_s=HANG_GUARD_S))
