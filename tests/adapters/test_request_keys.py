"""What goes into a request's key, and what its client asks for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvstore.adapters.vllm.glue.requests import adapter_of, is_shareable, key_extras, request_params
from kvstore.adapters.vllm.identity import fingerprint_adapter
from kvstore.adapters.vllm.requests.adapterfiles import Adapter
from kvstore.adapters.vllm.requests.params import NO_PARAMS, RequestParams
from kvstore.config.schema import REQUEST_FIELDS
from kvstore.keys import PrefixHasher

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


def keys(request: Request) -> list[bytes]:
    adapter = adapter_of(request)
    files = fingerprint_adapter(Path(adapter.folder)) if adapter is not None else ""
    extras = key_extras(request, lora_files=files)
    hasher = PrefixHasher(4 * BLOCK, BLOCK, extras)
    hasher.update(request.all_token_ids)
    return hasher.block_keys(0)


def image(identifier: str, offset: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=BLOCK)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678")
    return LoRARequest("style", 1, str(tmp_path))


def test_equal_requests_share() -> None:
    assert keys(request()) == keys(request(request_id="two"))


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
    """Two of one name share whatever their salts, so that vLLM's own cache, which goes by the salt, does not answer."""

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
