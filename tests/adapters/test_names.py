"""Names of a model's KV: its weights, its draft layers, and the effect of the longest context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from support.vllm_objects import BLOCK, cache_config, spec, worker_config
from vllm import envs
from vllm.config.quantization import resolve_quantization_config
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvstore.adapters.vllm.glue.fields import VARIABLES
from kvstore.adapters.vllm.glue.namespace import namespace_of
from kvstore.config.schema import StoreConfig
from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace

pytestmark = pytest.mark.vllm

COMMITS = {name: digit * 40 for name, digit in (("weights", "a"), ("other weights", "b"), ("config", "c"))}
FACTORS = {"short_factor": [1.0], "long_factor": [4.0]}
LONGROPE = {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}}


def named(config: Any, **store: Any) -> Namespace:
    paged: Any = SimpleNamespace(layout=SimpleNamespace(fingerprint="0" * 16))
    return namespace_of(config, cache_config(), StoreConfig(**store), paged)


def model(fields: dict[str, Any] | None = None, **changes: Any) -> Namespace:
    """Return the namespace of a model with such a configuration and such settings."""
    config = worker_config()
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: dict(fields or {}))
    vars(config.model_config).update(changes)
    return named(config, model_id="mine")


# -- the longest context -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [LONGROPE, {"text_config": LONGROPE}, {"rope_parameters": {"full": LONGROPE}}])
def test_longrope_is_named_by_the_factors_in_use(fields: dict[str, Any]) -> None:
    """vLLM uses the long factors if a context may be longer than the original one."""
    short, still_short, long, longer = (model(fields, max_model_len=n) for n in (1000, 4096, 4097, 131072))
    assert short.id == still_short.id
    assert long.id == longer.id
    assert short.differing_fields(long) == ["rope"]


def test_longrope_of_older_configurations() -> None:
    """There the original length is outside the factors' section."""
    fields = {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su", **FACTORS}}
    assert model(fields, max_model_len=4096).differing_fields(model(fields, max_model_len=8192)) == ["rope"]


def test_a_length_that_vllm_fits_to_its_memory_is_that_with_which_layers_were_built() -> None:
    def fitted(to: int, built: int) -> Namespace:
        return model(LONGROPE, max_model_len=to, original_max_model_len=-1, get_and_verify_max_len=lambda _: built)

    assert fitted(2000, 131072).id == model(LONGROPE, max_model_len=131072).id
    assert fitted(2000, 4096).id == model(LONGROPE, max_model_len=4096).id


@pytest.mark.parametrize("kind", ["default", "yarn", "llama3", "dynamic", "linear", "deepseek_yarn", "proportional"])
def test_the_length_does_not_matter_elsewhere(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 4096}
    short, long = (model({"rope_parameters": rope}, max_model_len=n) for n in (4096, 8192))
    assert short.id == long.id
    assert "rope" not in long.fields


def test_a_length_that_vllm_writes_into_the_configuration_does_not_matter() -> None:
    """vLLM writes it for MiniMax-M2."""
    assert model({"max_model_len": 4096}).id == model({"max_model_len": 8192}).id == model().id


def test_llama_4_is_named_by_whether_its_attention_is_tuned() -> None:
    """A longer context turns it on, and so may either generation configuration; the model's own is a copy."""

    def llama4(length: int, found: dict[str, Any] | None = None, given: dict[str, Any] | None = None) -> str:
        text = SimpleNamespace(model_type="llama4_text")
        settings: dict[str, Any] = {
            "try_get_generation_config": lambda: found or {},
            "override_generation_config": given or {},
        }
        return str(model(hf_text_config=text, max_model_len=length, **settings).fields["attention_scale"])

    off, on = {"attn_temperature_tuning": False}, {"attn_temperature_tuning": True}
    assert [llama4(length) for length in (8192, 32768, 32769)] == ["False", "False", "True"]
    assert [llama4(8192, on), llama4(65536, off)] == ["True", "False"]
    assert [llama4(8192, off, on), llama4(65536, on, off)] == ["True", "False"]


# -- weights -----------------------------------------------------------------------------------------------------------


class Resolved(str):
    """A revision as huggingface_hub resolves it: its name, with the commit as an attribute."""

    __slots__ = ("resolved",)
    resolved: str


def resolved(commit: str) -> Resolved:
    revision = Resolved("main")
    revision.resolved = commit
    return revision


def hub(weights: str, config_path: str | None, revision: object) -> str:
    """Return the identity of a hub model whose configuration's commit is known."""
    config = worker_config()
    config.load_config = SimpleNamespace(load_format="auto")
    vars(config.model_config).update(model=weights, hf_config_path=config_path, revision=revision)
    commit = COMMITS["weights" if config_path in {None, weights} else "config"]
    config.model_config.hf_config = SimpleNamespace(to_dict=dict, _commit_hash=commit)
    return str(named(config).fields["model"])


def test_a_hub_model_is_named_by_the_commit_of_its_weights() -> None:
    assert hub("org/model", None, None) == f"hub org/model@{COMMITS['weights']}"
    assert hub("org/model", "org/model", None) == f"hub org/model@{COMMITS['weights']}"


def test_a_configuration_from_elsewhere_does_not_name_the_weights() -> None:
    for commit in (COMMITS["weights"], COMMITS["other weights"]):
        assert hub("org/model", "org/config", resolved(commit)) == f"hub org/model@{commit}"
        assert hub("org/model", "org/config", commit) == f"hub org/model@{commit}"
    for unknown in (None, "main"):
        with pytest.raises(ConfigError, match=r"set kvstore\.model_id"):
            hub("org/model", "org/config", unknown)


def test_a_model_in_one_file_is_named_by_its_content(tmp_path: Path) -> None:
    file, found = tmp_path / "model.gguf", []
    for content in (b"Q4 weights", b"another finetune", b"Q4 weights"):
        file.write_bytes(content)
        found.append(hub(str(file), "org/config", None))
    assert found[0] == found[2] != found[1]


def test_online_quantization_is_named_by_its_configuration() -> None:
    """``--quantization`` alone does not tell which layers stay unquantized."""
    given: list[dict[str, Any] | None] = [None, {"ignore": ["re:.*layers.0.*"]}, {"ignore": ["re:.*layers.1.*"]}]
    online = [resolve_quantization_config("fp8_per_tensor", one) for one in given]
    found = [model(quantization="fp8_per_tensor", quantization_config=one) for one in (*online, online[0])]
    assert found[0].id == found[3].id
    assert len({one.id for one in found}) == 3
    assert found[0].differing_fields(found[1]) == ["ModelConfig.quantization_config"]


def test_a_backend_that_puts_k_and_v_into_slots_is_named() -> None:
    """With two heads its pages have the shape of others: a slot for each of K and V, or one for each head."""
    plain = spec()
    slots = replace(plain, num_head_slots=2, state_content_bytes=plain.unpadded_page_size_bytes // (2 * BLOCK))
    assert (slots.num_heads, slots.state_content_size_bytes) == (plain.num_heads, plain.state_content_size_bytes)
    paged: Any = SimpleNamespace(layout=SimpleNamespace(fingerprint="0" * 16))
    found = [
        namespace_of(
            worker_config(), cache_config(KVCacheGroupSpec(["layer.0"], one)), StoreConfig(model_id="m"), paged
        )
        for one in (plain, slots)
    ]
    assert found[0].differing_fields(found[1]) == ["states"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_platforms_with_other_fp8_numbers_share_no_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of an MI300 have the same shapes and types as those of other devices."""
    cache = cache_config(KVCacheGroupSpec(["layer.0"], replace(spec(), dtype=dtype)))
    paged: Any = SimpleNamespace(layout=SimpleNamespace(fingerprint="0" * 16))
    found = [namespace_of(worker_config(), cache, StoreConfig(model_id="m"), paged)]
    platform = type(vllm.platforms.current_platform)
    monkeypatch.setattr(platform, "fp8_dtype", classmethod(lambda _: torch.float8_e4m3fnuz))
    found.append(namespace_of(worker_config(), cache, StoreConfig(model_id="m"), paged))
    assert found[0].differing_fields(found[1]) == (["fp8"] if dtype is torch.uint8 else [])


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_variables")
def test_variables_have_the_defaults_of_vllm() -> None:
    known = VARIABLES.keys() & envs.environment_variables.keys()  # an older vLLM lacks some
    assert "VLLM_MOE_ROUTING_SIMULATION_STRATEGY" in known
    assert {name: envs.environment_variables[name]() for name in known} == {name: VARIABLES[name] for name in known}


@pytest.mark.usefixtures("_no_variables")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_CPU_INT4_W4A8", "0"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"dtype": "int4"}'),
    ],
)
def test_variables_with_which_vllm_computes_other_values_are_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in envs.environment_variables:
        pytest.skip("not in this vLLM")
    found = [named(worker_config(), model_id="m")]
    monkeypatch.setenv(name, value)
    found.append(named(worker_config(), model_id="m"))
    assert found[0].differing_fields(found[1]) == [name]


@pytest.mark.usefixtures("_no_variables")
@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_MARLIN_INPUT_DTYPE", "int3"), ("VLLM_HUMMING_INPUT_QUANT_CONFIG", "{")]
)
def test_a_variable_that_vllm_cannot_read_is_named_as_it_is(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM starts, unless it needs the value."""
    if name not in envs.environment_variables:
        pytest.skip("not in this vLLM")
    monkeypatch.setenv(name, value)
    assert named(worker_config(), model_id="m").fields[name] == value


# -- draft layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"])
def test_speculation_without_draft_layers_changes_nothing(method: str) -> None:
    config = worker_config()
    config.speculative_config = SimpleNamespace(method=method, model=method, quantization="fp8")
    assert named(config, model_id="mine").id == model({"hidden": 8}).id


def drafting(**settings: Any) -> Namespace:
    """Return the namespace of a model with draft layers and such settings of them."""
    config = worker_config()
    config.speculative_config = SimpleNamespace(method="eagle3", **settings)
    return named(config, model_id="mine")


def test_draft_layers_are_named_with_their_settings() -> None:
    changes: list[dict[str, Any]] = [{}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}]
    found = [drafting(model="org/draft", **settings) for settings in changes]
    assert found[0].fields["draft"] == "org/draft"
    assert len({one.id for one in found}) == 3


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "EAGLE"])
def test_a_draft_of_the_hub_is_named_by_the_commit_of_its_weights(*, is_wrapped: bool) -> None:
    """vLLM wraps the configuration of an EAGLE draft in one that does not know the commit."""
    found = []
    for commit in (COMMITS["weights"], COMMITS["other weights"], COMMITS["weights"]):
        known = SimpleNamespace(_commit_hash=None if is_wrapped else commit)
        draft = SimpleNamespace(model="org/draft", hf_config=known, revision=resolved(commit) if is_wrapped else None)
        found.append(drafting(model="org/draft", revision=None, draft_model_config=draft))
    assert found[0].id == found[2].id
    assert found[0].differing_fields(found[1]) == ["draft"]


def test_a_draft_of_unknown_commit_is_named_by_the_revision_that_was_asked_for() -> None:
    plain, one, other = (drafting(model="org/draft", revision=revision) for revision in (None, "v1", "v2"))
    assert len({plain.id, one.id, other.id}) == 3


def test_a_draft_in_one_file_is_named_by_its_content(tmp_path: Path) -> None:
    file, found = tmp_path / "draft.gguf", []
    for content in (b"Q4 weights", b"another draft", b"Q4 weights"):
        file.write_bytes(content)
        found.append(drafting(model=str(file)).id)
    assert found[0] == found[2] != found[1]
