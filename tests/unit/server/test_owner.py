"""Admission of clients by the server of an engine."""

from __future__ import annotations

from support.divided import Worker

from kvstore.model.heads import Part
from kvstore.model.keys import Namespace
from kvstore.protocol import messages
from kvstore.protocol.payload import Geometry
from kvstore.server.owner import Owner


def hello(worker: Worker, token: bytes = b"") -> messages.Hello:
    fields = dict(worker.namespace.fields)
    geometry = Geometry.of(worker.paged.layout)
    return messages.Hello(1, messages.PROTOCOL_VERSION, fields, geometry, 0, token)


def parts_sent_to(worker: Worker, *sizes: int) -> list[Part]:
    parts = [part for size in sizes for part in worker.division(size).parts]
    return [part for part in parts if part.sends_to == worker.shard]


def test_workers_that_have_parts_of_its_chunks_are_let_in_by_one() -> None:
    mine = Worker(0, 2)
    owner = Owner(mine.namespace, mine.paged.layout, parts=parts_sent_to(mine, 1, 4))
    assert owner.objection(hello(mine)) == ""
    assert owner.objection(hello(Worker(0, 4))) == owner.objection(hello(Worker(1, 4))) == ""
    assert "differ in shard" in owner.objection(hello(Worker(2, 4))), "its heads are another worker's"
    assert owner.objection(hello(Worker(0, 1))) == ""
    second = Worker(1, 2)
    other = Owner(second.namespace, second.paged.layout, parts=parts_sent_to(second, 1, 4))
    assert "differ in layout, shard" in other.objection(hello(Worker(0, 1))), "it is sent to the first, and read there"
    assert other.objection(hello(Worker(3, 4))) == ""
    assert "differ in layout, shard" in Owner(mine.namespace, mine.paged.layout).objection(hello(Worker(0, 4)))
    wrong = Worker(0, 4)
    wrong.namespace = Namespace({**wrong.namespace.fields, "model": "another"})
    assert "differ in model" in owner.objection(hello(wrong))


def test_parts_are_of_the_owners_epoch() -> None:
    mine, part = Worker(0, 1), Worker(0, 2)
    owner = Owner(mine.namespace, mine.paged.layout, parts=parts_sent_to(mine, 2))
    assert owner.owns(mine.namespace)
    assert owner.owns(part.namespace)
    assert not owner.owns(Worker(0, 4).namespace)
    owner.namespace = mine.namespace.at_epoch("1")
    assert not owner.owns(part.namespace)
    assert "differ in epoch" in owner.objection(hello(part))
    part.namespace = part.namespace.at_epoch("1")
    assert owner.owns(part.namespace)
    assert owner.objection(hello(part)) == ""
