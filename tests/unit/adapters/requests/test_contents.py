"""Images that vLLM does not name by their content, whose inputs are hashed off the scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from support.few_threads import refuse_threads
from support.gate import HANG_GUARD_S, Gate

from kvstore.adapters.vllm.requests import contents
from kvstore.adapters.vllm.requests.adapterfiles import AdapterFiles
from kvstore.adapters.vllm.requests.arrivals import Arrivals, Known
from kvstore.adapters.vllm.requests.contents import Unnamed, content_name
from kvstore.model.keys import Feature

PIXELS = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.fixture
def arriving() -> Iterator[Arrivals]:
    made = Arrivals(AdapterFiles(), HANG_GUARD_S)
    yield made
    made.close()


@pytest.fixture
def admitted() -> list[Known | None]:
    return []


def picture(pixels: object = PIXELS, offset: int = 0) -> Unnamed:
    return Unnamed("image", {"pixel_values": pixels}, offset, 4)


def name(**inputs: object) -> str | None:
    return content_name("image", inputs)


def test_equal_inputs_have_one_name_in_whatever_order_and_memory() -> None:
    grid = torch.tensor([1, 2, 3])
    strided = PIXELS.T.contiguous().T
    assert not strided.is_contiguous()
    found = name(pixels=PIXELS, grid=grid)
    assert found is not None
    assert name(grid=grid.clone(), pixels=strided) == found
    assert name(pixels=[PIXELS, 2]) == name(pixels=(PIXELS, 2)), "a tuple is a list once it was sent"
    assert name(pixels=torch.tensor(1.0)) is not None
    assert name(pixels=torch.ones(2, dtype=torch.bfloat16)) is not None


def test_whatever_differs_gives_another_name() -> None:
    values: list[object] = [
        PIXELS,
        PIXELS + 1,
        PIXELS.reshape(4, 3),
        PIXELS.view(torch.int32),
        PIXELS.numpy(),
        [PIXELS],
        [PIXELS, PIXELS],
        [[PIXELS], PIXELS],
        [[PIXELS, PIXELS]],
        [],
        1,
        1.0,
        True,
        "1",
        np.float32(1),
    ]
    names = [name(pixels=value) for value in values]
    names += [name(image=PIXELS), name(pixels=PIXELS, grid=1), content_name("video", {"pixels": PIXELS})]
    assert None not in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "value",
    [None, [PIXELS, None], object(), np.array([object()]), PIXELS.to_sparse(), PIXELS.to("meta")],
    ids=["none", "none in a list", "object", "array of objects", "sparse", "on a device"],
)
def test_what_is_elsewhere_or_unknown_has_no_name(value: object) -> None:
    assert name(pixels=value) is None
    assert name(grid=1, pixels=value) is None
    assert name() is None


def test_a_request_waits_until_its_images_are_named(
    arriving: Arrivals, admitted: list[Known | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(contents, "content_name", gate.before(content_name))
    first, last = Feature("a hash", 0, 4), Feature("another", 12, 4)
    arriving.add("one", None, [first, picture(offset=4), last], admitted.append)
    assert not arriving.is_admitted("one")
    assert not admitted
    gate.open()
    wait(arriving._waiting["one"].missing(), HANG_GUARD_S)
    assert arriving.is_admitted("one")
    named = Feature(content_name("image", {"pixel_values": PIXELS}) or "never", 4, 4)
    assert admitted == [Known(features=(first, named, last))]


def test_one_whose_images_have_names_need_not_wait(arriving: Arrivals, admitted: list[Known | None]) -> None:
    arriving.add("one", None, [Feature("a hash", 0, 4)], admitted.append)
    assert admitted == [Known(features=(Feature("a hash", 0, 4),))]
    assert arriving.is_admitted("one")


def test_one_with_an_image_that_cannot_be_named_does_without_the_cache(
    arriving: Arrivals, admitted: list[Known | None], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        arriving.add(f"{number}", None, [picture(), picture(None)], admitted.append)
        wait(arriving._waiting[f"{number}"].missing(), HANG_GUARD_S)
        assert arriving.is_admitted(f"{number}")
    assert admitted == [None, None]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "counter" in said
    assert "--enable-prefix-caching" in said


def test_one_whose_images_take_too_long_does_without_the_cache(
    admitted: list[Known | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(contents, "content_name", gate.before(content_name))
    arriving = Arrivals(AdapterFiles(), 0.0)
    for number in range(4):  # more than there are threads
        arriving.add(f"{number}", None, [picture()], admitted.append)
        assert arriving.is_admitted(f"{number}")
    assert admitted == [None] * 4
    gate.open()
    arriving.close()


def test_where_no_thread_can_be_started_an_input_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is computed, and does not end the scheduler."""
    refuse_threads(monkeypatch, "kvstore-contents")
    looking = contents.Contents()
    assert looking.look(picture()).result(HANG_GUARD_S) is None
    looking.close()
