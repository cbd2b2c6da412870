"""Contents of a request's key, and its fields."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.utils.counter import AtomicCounter
from vllm.v1.request import Request

from kvstore.adapters.vllm.glue.requests import (
    adapter_of,
    extra_args_of,
    features_of,
    hints_of,
    is_shareable,
    key_extras,
)
from kvstore.adapters.vllm.identity import fingerprint_adapter
from kvstore.adapters.vllm.requests.adapterfiles import Adapter
from kvstore.adapters.vllm.requests.arrivals import Known
from kvstore.adapters.vllm.requests.contents import Unnamed, content_name
from kvstore.adapters.vllm.requests.params import MAX_TTL_S, NO_PARAMS, RequestParams, parse_params
from kvstore.config.schema import REQUEST_FIELDS
from kvstore.model.keys import Feature, PrefixHasher

pytestmark = pytest.mark.vllm

BLOCK = 16
PROMPT = list(range(4 * BLOCK))


def request(**fields: Any) -> Request:
    defaults: dict[str, Any] = {
        "request_id": "one",
        "prompt_token_ids": list(PROMPT),
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
    }
    return Request(**{**defaults, **fields})


def configured(cache_gb: float = 4, *, prefix_caching: bool = True) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


COUNTS = configured(0, prefix_caching=False)


def keys(request: Request, config: Any = None) -> list[bytes]:
    adapter = adapter_of(request)
    files = fingerprint_adapter(Path(adapter.folder)) if adapter is not None else ""
    features = features_of(request, config or configured())
    named = [
        Feature(content_name(item.modality, item.inputs) or "", item.offset, item.length)
        if isinstance(item, Unnamed)
        else item
        for item in features
    ]
    extras = key_extras(request, known=Known(files, tuple(named)))
    hasher = PrefixHasher(4 * BLOCK, BLOCK, extras)
    hasher.update(request.all_token_ids)
    return hasher.block_keys(0)


def image(identifier: str, offset: int, pixels: torch.Tensor | None = None) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=BLOCK)
    field = MultiModalSharedField(batch_size=1)
    data = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, field)}) if pixels is not None else None
    return MultiModalFeatureSpec(data=data, modality="image", identifier=identifier, mm_position=place)


def named_by_vllm(config: Any, processor_arguments: dict[str, object], uuid: str | None = None) -> str:
    """Return the name that vLLM gives to the first image of a process."""
    renderer: Any = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None,
        api_process_rank=0, _mm_req_counter=AtomicCounter(),
    )  # fmt: skip
    request_id = f"renderer{renderer.api_process_rank}-mm-{renderer._mm_req_counter.inc(1)}"
    items: Any = _OneImage()
    uuids = BaseRenderer._process_mm_uuids(renderer, {"image": [b""]}, items, {"image": [uuid]}, request_id)
    inputs = ProcessorInputs(PROMPT, items, uuids, hf_processor_mm_kwargs=processor_arguments)
    return str(inputs.get_mm_hashes("model", "sha256")["image"][0])


class _OneImage(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__(image=self)

    def get_all_items_for_hash(self) -> list[bytes]:
        return [b""]

    def get_all_counts(self) -> dict[str, int]:
        return {"image": 1}


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678")
    return LoRARequest("style", 1, str(tmp_path))


def test_equal_requests_share() -> None:
    assert keys(request()) == keys(request(request_id="two"))


def request_params(asked: Request, counted: Collection[str]) -> RequestParams:
    return parse_params(extra_args_of(asked), asked.kv_transfer_params, counted=counted)


def test_what_a_client_asks_comes_from_both_places_and_transfer_params_count() -> None:
    extra = {"kvstore.ttl": 5, "kvstore.skip_load": 1, "kv_transfer_params": {"lmcache.tag.team": "red"}}
    asked = request(sampling_params=SamplingParams(max_tokens=1, extra_args=extra))
    params = request_params(asked, REQUEST_FIELDS)
    assert params == RequestParams(skip_load=True, ttl_s=5, tags=(("team", "red"),))
    assert request_params(request(), REQUEST_FIELDS) == NO_PARAMS
    pooling = request(sampling_params=None, pooling_params=PoolingParams())
    assert request_params(pooling, REQUEST_FIELDS) == NO_PARAMS
    extra["kv_transfer_params"] = {"kvstore.ttl": 6}
    later = request(sampling_params=SamplingParams(extra_args=extra))
    assert request_params(later, REQUEST_FIELDS).ttl_s == 6
    assert request_params(later, ["pin"]) == RequestParams(ignored=("skip_load", "ttl"))


def test_tags_keep_apart() -> None:
    extras = [key_extras(request(), RequestParams(tags=tags)) for tags in ((), (("team", "red"),), (("team", "blue"),))]
    assert len({found.seed() for found in extras}) == 3


def test_salts_keep_apart() -> None:
    assert len({keys(request(cache_salt=salt))[0] for salt in (None, "a", "b")}) == 3


def test_a_probe_stands_for_the_salt() -> None:
    """Requests with one probe share whatever their salts, as vLLM's own cache goes by salts and must not answer."""

    def seed(salt: str | None, probe: str | None, team: str = "red") -> bytes:
        params = RequestParams(probe=probe, tags=(("team", team),))
        return key_extras(request(cache_salt=salt), params).seed()

    assert seed("a", "x") == seed("b", "x") == seed(None, "x")
    others = [seed("a", "y"), seed("a", None), seed("x", None), seed(None, None), seed("a", "x", "blue")]
    assert len({seed("a", "x"), *others}) == 6


def test_images_behind_equal_placeholders_keep_apart_from_where_they_begin() -> None:
    plain, cat, dog, moved = (
        keys(request(mm_features=features))
        for features in ([], [image("cat", 2 * BLOCK)], [image("dog", 2 * BLOCK)], [image("cat", BLOCK)])
    )
    assert plain[:2] == cat[:2] == dog[:2]
    assert len({plain[2], cat[2], dog[2], moved[2]}) == 4
    assert len({plain[3], cat[3], dog[3], moved[3]}) == 4


@pytest.mark.parametrize("arguments", [{}, {"max_pixels": 784}], ids=["plain", "with arguments"])
def test_images_that_vllm_counts_keep_apart_by_their_content(arguments: dict[str, object]) -> None:
    """Their names start again in every process, and with arguments look like hashes of content."""
    name, again = (named_by_vllm(COUNTS, arguments) for _ in range(2))
    assert name == again
    cat, dog, same = (
        keys(request(mm_features=[image(name, 0, torch.full((4, 4), pixel))]), COUNTS) for pixel in (0.0, 1.0, 0.0)
    )
    assert cat == same
    assert cat[0] != dog[0]


def test_what_vllm_hashes_or_a_client_names_keeps_its_name() -> None:
    for config in (configured(), configured(0), configured(prefix_caching=False)):
        for uuid in (None, "cat"):
            name = named_by_vllm(config, {}, uuid)
            assert features_of(request(mm_features=[image(name, 0, torch.ones(4))]), config) == [
                Feature(name, 0, BLOCK)
            ]


@pytest.mark.parametrize(
    ("config", "name", "pixels"),
    [(COUNTS, "a name", None), (configured(), "renderer3-mm-7-image-0", torch.ones(1)),
     (configured(), "style:renderer0-mm-0-image-0", torch.ones(1))],
    ids=["not sent", "counted elsewhere", "of a LoRA"],
)  # fmt: skip
def test_an_image_without_content_or_name_has_none(config: Any, name: str, pixels: torch.Tensor | None) -> None:
    """With a cache in vLLM, the item may hold an address in it instead of pixels."""
    (item,) = features_of(request(mm_features=[image(name, 0, pixels)]), config)
    assert isinstance(item, Unnamed)
    assert content_name(item.modality, item.inputs) is None


def test_lora_keeps_apart_and_a_copy_is_the_same(lora: LoRARequest, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    for folder in (copy, other):
        folder.mkdir()
        for path in tmp_path.glob("adapter*"):
            shutil.copyfile(path, folder / path.name)
    (other / "adapter_model.safetensors").write_bytes(b"12345679")
    plain, style, same, changed, renamed = (
        keys(request(lora_request=adapter))[0]
        for adapter in (
            None,
            lora,
            LoRARequest("style", 2, str(copy)),
            LoRARequest("style", 2, str(other)),
            LoRARequest("other", 3, lora.lora_path),
        )
    )
    assert style == same
    assert len({plain, style, changed, renamed}) == 4


def test_lora_loaded_in_place_is_known_as_such(lora: LoRARequest) -> None:
    lora.load_inplace = True
    assert adapter_of(request(lora_request=lora)) == Adapter(1, "style", lora.lora_path, in_place=True)
    assert adapter_of(request()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": None, "prompt_embeds": torch.zeros(8, 4)},
        {"prompt_embeds": torch.zeros(64, 4), "prompt_is_token_ids": [True] * 64},
        {"sampling_params": None, "pooling_params": PoolingParams()},
        {"resumable": True},
    ],
    ids=["embeddings", "mixed embeddings", "pooling", "session"],
)
def test_what_tokens_do_not_tell_is_not_shared(fields: dict[str, Any]) -> None:
    assert not is_shareable(request(**fields))


def test_a_routers_hints() -> None:
    """The envelope of vLLM's own types; actions and values that we do not know do not count."""
    hints = pytest.importorskip("vllm.v1.kv_hints", reason="new in vLLM 0.32")

    def asked(*actions: tuple[str, dict[str, Any]]) -> dict[str, object]:
        named = [hints.KvHintAction("1", kind, "1", payload) for kind, payload in actions]
        return hints_of(request(kv_hints=hints.KvHintsEnvelope("0.1", "message", named)))

    assert hints_of(request()) == {}
    assert asked() == asked(("unknown", {"ttl_seconds": 5})) == asked(("retain", {})) == {}
    assert asked(("demote", {}), ("retain", {"ttl_seconds": 7})) == {"kvstore.demote": True, "kvstore.retain": 7}
    assert asked(("drop", {"ttl_seconds": 5})) == {"kvstore.drop": True}
    assert asked(("retain", {"ttl_seconds": 300}), ("retain", {"ttl_seconds": 20})) == {"kvstore.retain": 300}
    assert asked(("retain", {"ttl_seconds": float("inf")})) == {"kvstore.retain": MAX_TTL_S}
    for wrong in (-1, 0, "300", None, float("nan"), [3]):
        assert asked(("retain", {"ttl_seconds": wrong})) == {}
    assert asked(*[("retain", {"ttl_seconds": number}) for number in range(1000)]) == {"kvstore.retain": 63}
