"""Events that vLLM publishes for announcements, through its own encoder."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import Request

from kvstore.adapters.vllm.telemetry import events as events_module
from kvstore.adapters.vllm.telemetry.announcer import NO_CONTEXT, Blocks, Context, Removed, Stored
from kvstore.adapters.vllm.telemetry.events import _known, as_kv_events, context_of
from kvstore.index.plans import Place

pytestmark = pytest.mark.vllm

SPEC = FullAttentionSpec(block_size=2, num_kv_heads=2, head_size=64, dtype=torch.float32)
OURS = {"locality": "LOCAL", "ownership": "kvstore"}
ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


def published(announced: list[Stored | Removed], spec: FullAttentionSpec = SPEC) -> list[BlockStored | BlockRemoved]:
    """Return the events that a listener decodes."""
    batch = KVEventBatch(ts=0.0, events=list(as_kv_events(announced, spec)))
    return list(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events)


def test_stored_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    adapter = LoRARequest("style", 7, "/adapters/style")
    context = Context((("style",), ("style", "salt")), "session 1")
    stored, removed = published(
        [
            Stored(Place.MEMORY, Blocks((TWO, THREE), ONE, array("I", [5, 6, 7, 8]), adapter, context)),
            Removed(Place.DISK, [ONE, TWO]),
        ]
    )
    assert stored == BlockStored(
        block_hashes=[TWO, THREE],
        parent_block_hash=ONE,
        token_ids=[5, 6, 7, 8],
        block_size=2,
        lora_id=7,
        medium="CPU",
        lora_name="style",
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        extra_keys=[("style",), ("style", "salt")],
        **OURS,
        session_id="session 1",
    )
    assert removed == BlockRemoved(block_hashes=[ONE, TWO], medium="STORAGE", group_idx=0, **OURS)


def test_fields_that_an_older_vllm_does_not_have_are_left_out() -> None:
    """vLLM 0.30 knows neither sessions nor localities."""

    class Older(msgspec.Struct):
        extra_keys: list[Any] | None = None

    assert _known(Older, extra_keys=[None], locality="LOCAL", session_id="one") == {"extra_keys": [None]}


def test_the_context_is_what_vllm_hashes_besides_tokens() -> None:
    adapter = LoRARequest("style", 7, "/adapters/style")
    salted = Request("one", [1] * 8, SamplingParams(), None, lora_request=adapter, cache_salt="salt")
    salted.session_id = "session 1"
    assert context_of(salted, range(3), 2) == Context((("style", "salt"), ("style",), ("style",)), "session 1")
    assert context_of(salted, range(1, 2), 2).extra_keys == (("style",),)
    assert context_of(Request("two", [1] * 8, SamplingParams(), None), range(3), 2) == NO_CONTEXT


def test_a_block_does_not_look_at_every_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand images in 128k tokens would hold up the scheduler."""
    looked: list[int] = []

    def extra_keys(_: object, begin: int, end: int, feature: int) -> tuple[None, int]:
        looked.append(feature)
        return None, feature + (end - begin)

    monkeypatch.setattr(events_module, "generate_block_hash_extra_keys", extra_keys)
    salted = Request("one", [1] * 8, SamplingParams(), None, cache_salt="salt")
    context_of(salted, range(3), 2)
    assert looked == [0, 2, 4], "the next block begins where the last one ended"


def test_parts_of_blocks_keep_their_context() -> None:
    blocks = Blocks((ONE, TWO, THREE), None, array("I", range(6)), None, Context(((1,), (2,), (3,)), "one"))
    behind, front = blocks.behind(1), blocks.up_to(2)
    assert (behind.hashes, behind.parent, list(behind.token_ids)) == ((TWO, THREE), ONE, [2, 3, 4, 5])
    assert behind.context == Context(((2,), (3,)), "one")
    assert (front.hashes, list(front.token_ids), front.context) == (
        (ONE, TWO),
        [0, 1, 2, 3],
        Context(((1,), (2,)), "one"),
    )
    assert blocks.behind(0) is blocks
    assert Blocks((ONE, TWO), None, array("I", range(4)), None).behind(1).context == NO_CONTEXT


def test_mla_and_hashes_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    spec = MLAAttentionSpec(block_size=2, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    (stored,) = published([Stored(Place.DISK, Blocks((ONE,), None, array("I", [5, 6]), None))], spec)
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [int.from_bytes(ONE[-8:], "big")]
    assert stored.parent_block_hash is None
    assert (stored.lora_id, stored.lora_name, stored.medium) == (None, None, "STORAGE")
    assert stored.kv_cache_spec_kind == "mla_attention"
