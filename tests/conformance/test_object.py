"""Tests of the object tier's contract in a shared folder and on real object stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pytest
from support.azure_server import AzureServer, running_azurite
from support.key_files import write_keys
from support.s3_server import S3Server

from kvstore.model.chunks import ChunkRef, Outcome
from kvstore.model.keys import KeyExtras
from kvstore.testing import MINE, TierConformance
from kvstore.testing.harness import EVEN, make_buffer, make_payload, make_ref, make_transfer
from kvstore.tiers.base import UNBOUNDED_BYTES, Tier, TierSetup, Transfer
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.object.names import Place, parse_place
from kvstore.tiers.object.tier import ObjectTier

BUCKET = "conformance"


class Objects(TierConformance):
    """Base of the tests here: raw access to the storage, of any kind."""

    persistent = True
    keeps_trails = True
    checks_bytes = True
    empty_is_absent = True

    def url(self) -> str:
        """Return the URL of a storage that is empty at first, for this harness alone."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the names of all objects."""
        raise NotImplementedError

    def load(self, name: str) -> bytes:
        raise NotImplementedError

    def save(self, name: str, value: bytes) -> None:
        raise NotImplementedError

    def drop(self, name: str) -> None:
        raise NotImplementedError

    def open_tier(self, setup: TierSetup) -> Tier:
        return ObjectTier.open(self.with_options(setup, url=self.url()))

    def chunks(self) -> dict[str, Place]:
        """Return all chunks of all namespaces by their names."""
        found = {name: parse_place(name) for name in self.names()}
        return {name: place for name, place in found.items() if place is not None}

    def _name(self, ref: ChunkRef) -> str | None:
        for name, place in self.chunks().items():
            if place.home.namespace_id == MINE.id and place.ref == ref:
                return name
        return None

    def raw_read(self, ref: ChunkRef) -> bytes | None:
        name = self._name(ref)
        return self.load(name) if name is not None else None

    def raw_write(self, ref: ChunkRef, value: bytes) -> None:
        name = self._name(ref)
        assert name is not None
        self.save(name, value)

    def raw_remove(self, ref: ChunkRef) -> None:
        name = self._name(ref)
        assert name is not None
        self.drop(name)

    def raw_used_bytes(self) -> int:
        return sum(len(self.load(name)) for name in self.chunks())


class TestFolder(Objects):
    """A folder on this machine."""

    def url(self) -> str:
        return f"file://{self.folder}/kv"

    def names(self) -> list[str]:
        root = self.folder / "kv"
        return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]

    def load(self, name: str) -> bytes:
        return (self.folder / "kv" / name).read_bytes()

    def save(self, name: str, value: bytes) -> None:
        (self.folder / "kv" / name).write_bytes(value)

    def drop(self, name: str) -> None:
        (self.folder / "kv" / name).unlink()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    server.make_bucket(BUCKET)
    yield server
    server.kill()


class Encoded(TestFolder):
    """Base of the tests with a codec, which decides on the sizes."""

    exact_sizes = False
    codec: ClassVar[str]

    def open_tier(self, setup: TierSetup) -> Tier:
        layout = replace(setup.layout, element="bf16") if self.codec == "split" else setup.layout
        return ObjectTier.open(self.with_options(replace(setup, layout=layout), url=self.url(), codec=self.codec))


@pytest.mark.sweep
class TestLz4(Encoded):
    """Chunks encoded with lz4."""

    codec = "lz4"


@pytest.mark.sweep
class TestSplit(Encoded):
    """Chunks encoded with split."""

    codec = "split"


class TestEncrypted(TestFolder):
    """Chunks sealed with a key."""

    equal_bytes = False
    exact_sizes = False
    codec = "none"

    def open_tier(self, setup: TierSetup) -> Tier:
        keys = write_keys(self.folder / "keys", "one")
        return ObjectTier.open(self.with_options(setup, url=self.url(), codec=self.codec, encryption_keys=keys))


@pytest.mark.sweep
class TestEncryptedAfterLz4(TestEncrypted):
    codec = "lz4"


@pytest.mark.parametrize("kind", ["disk", "object"])
def test_a_chunk_is_a_miss_for_every_other_key(tmp_path: Path, kind: str) -> None:
    """Also if the keys of two tenants change places; without keys; and for keys, chunks that are not encrypted."""
    acme, bolt = (KeyExtras(cache_salt=salt).tenant() for salt in ("acme", "bolt"))
    both = write_keys(tmp_path / "both", "own", acme="acme", bolt="bolt")
    swapped = write_keys(
        tmp_path / "swapped", "own", secrets={"acme": "bolt", "bolt": "acme"}, acme="acme", bolt="bolt"
    )
    later = write_keys(tmp_path / "later", "own", acme="acme", acme_2="acme", bolt="bolt")

    def tier(keys: Path | None) -> Tier:
        options: dict[str, Any] = {} if keys is None else {"encryption_keys": keys}
        if kind == "object":
            setup = TierSetup(MINE, EVEN, UNBOUNDED_BYTES, options | {"url": f"file://{tmp_path}/kv"})
            return ObjectTier.open(setup)
        return DiskTier.open(TierSetup(MINE, EVEN, 1 << 30, options | {"folder": tmp_path / "kv"}))

    def put(keys: Path | None, tenant: bytes, number: int) -> None:
        opened = tier(keys)
        assert opened.put([make_transfer(EVEN, make_ref(number))._replace(tenant=tenant)]) == [Outcome.STORED]
        opened.close()

    def get(keys: Path | None, number: int) -> Outcome:
        opened, buffer, ref = tier(keys), make_buffer(EVEN.slot_bytes), make_ref(number)
        (outcome,) = opened.get([Transfer(ref, buffer)])
        assert opened.counters.corrupt == 0
        opened.close()
        payload = make_payload(EVEN, ref)
        assert outcome is not Outcome.HIT or buffer[: len(payload)].tobytes() == payload
        return outcome

    for number, (keys, tenant) in enumerate(((None, acme), (both, acme), (both, bolt), (both, b""))):
        put(keys, tenant, number)
    assert [get(keys, number) for keys in (both, later) for number in (1, 2, 3)] == [Outcome.HIT] * 6
    assert get(swapped, 3) is Outcome.HIT
    assert [get(swapped, 1), get(swapped, 2), get(both, 0)] == [Outcome.MISS] * 3
    assert [get(both, 1), get(both, 2)] == [Outcome.MISS] * 2, "they were removed, to be stored again"
    put(later, acme, 1)
    assert [get(both, 1), get(later, 1)] == [Outcome.MISS] * 2, "its key is newer than that file"
    put(None, b"", 4)
    put(both, b"", 5)
    assert [get(None, 4), get(None, 5)] == [Outcome.HIT, Outcome.MISS]


def test_chunks_of_another_codec_are_misses(tmp_path: Path) -> None:
    """They are removed; chunks without a codec are read by all."""

    layout = replace(EVEN, element="bf16")

    def tier(codec: str) -> ObjectTier:
        return ObjectTier.open(
            TierSetup(MINE, layout, UNBOUNDED_BYTES, {"url": f"file://{tmp_path}/kv", "codec": codec})
        )

    def moved(codec: str, ref: ChunkRef) -> Outcome:
        opened, buffer = tier(codec), make_buffer(EVEN.slot_bytes)
        (outcome,) = opened.get([Transfer(ref, buffer)])
        opened.close()
        payload = make_payload(EVEN, ref)
        assert outcome is not Outcome.HIT or buffer[: len(payload)].tobytes() == payload
        return outcome

    plain, encoded, other = make_ref(1), make_ref(2), make_ref(3)
    for codec, ref in (("none", plain), ("lz4", encoded), ("lz4", other)):
        opened = tier(codec)
        assert opened.put([make_transfer(EVEN, ref)]) == [Outcome.STORED]
        opened.close()
    assert [moved("lz4", plain), moved("lz4", encoded)] == [Outcome.HIT] * 2
    assert [moved("none", encoded), moved("split", other)] == [Outcome.MISS] * 2
    assert [moved("lz4", encoded), moved("lz4", other)] == [Outcome.MISS] * 2, "they were removed"


class InBucket(Objects):
    """Base of the tests on a server, with a prefix for each harness."""

    prefixes: ClassVar = count()
    client: ClassVar[Any]
    prefix: str
    _last_folder: Path | None = None

    def url(self) -> str:
        if self.folder != self._last_folder:  # a new harness begins with an empty storage
            self._last_folder = self.folder
            self.prefix = f"{type(self).__name__}/{next(self.prefixes)}"
        return self.address()

    def address(self) -> str:
        raise NotImplementedError

    def names(self) -> list[str]:
        pages = obstore.list(self.client, self.prefix + "/")
        return [found["path"].removeprefix(self.prefix + "/") for page in pages for found in page]

    def load(self, name: str) -> bytes:
        return bytes(obstore.get(self.client, f"{self.prefix}/{name}").bytes())

    def save(self, name: str, value: bytes) -> None:
        obstore.put(self.client, f"{self.prefix}/{name}", value)

    def drop(self, name: str) -> None:
        obstore.delete(self.client, f"{self.prefix}/{name}")


class OnS3(InBucket):
    """Base of the tests on a real S3 server."""

    server: ClassVar[S3Server]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, s3: S3Server) -> None:
        cls.server, cls.client = s3, s3.client(BUCKET)

    def address(self) -> str:
        return self.server.url(BUCKET, prefix=self.prefix)


class TestS3(OnS3):
    """An S3 server."""


@pytest.mark.sweep
class TestS3OverTls(OnS3):
    """The same over TLS, with a CA of its own."""

    def address(self) -> str:
        return self.server.url(BUCKET, tls=True, prefix=self.prefix)


class TestAzure(InBucket):
    """Microsoft's emulator."""

    server: ClassVar[AzureServer]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with running_azurite(tmp_path_factory.mktemp("azurite"), BUCKET) as cls.server:
            cls.client = cls.server.client(BUCKET)
            yield

    def address(self) -> str:
        return self.server.url(BUCKET, self.prefix)


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("by_layers", [False, True])
def test_an_object_whose_writer_was_killed_at_its_begin_is_a_miss(
    tmp_path: Path, codec: str, *, by_layers: bool
) -> None:
    """SeaweedFS stores it with no byte. A bucket is not damaged by that, and the next engine stores the chunk again."""
    tier = ObjectTier.open(TierSetup(MINE, EVEN, UNBOUNDED_BYTES, {"url": f"file://{tmp_path}/kv", "codec": codec}))
    transfer = make_transfer(EVEN, make_ref(1))
    assert tier.put([transfer]) == [Outcome.STORED]
    (path,) = (tmp_path / "kv").rglob("*.safetensors")
    path.write_bytes(b"")
    into = Transfer(transfer.ref, make_buffer(EVEN.slot_bytes))
    found = tier.get_layers([into], range(1)) if by_layers and tier.reads_layers else tier.get([into])
    assert found == [Outcome.MISS]
    assert tier.contains([transfer.ref]) == [False]
    assert not path.exists()
    assert tier.put([transfer]) == [Outcome.STORED]
    assert tier.get([into]) == [Outcome.HIT]
    tier.close()
