"""Fields of vLLM's settings, each listed for every supported version; an unknown field is written or refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from support.vllm_fields import CONFIGS, Fields, fields_of, installed, recorded
from support.vllm_objects import cache_config, mamba, spec, worker_config
from vllm.config import CacheConfig
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from kvstore.adapters.vllm.glue import settings
from kvstore.adapters.vllm.glue.fields import MODEL_DTYPE, RULES, Rule, Treatment
from kvstore.adapters.vllm.glue.settings import settings_of
from kvstore.model.errors import ConfigError
from kvstore.tools.dev.matrix import VERSIONS

pytestmark = pytest.mark.vllm

WRITTEN = [
    (name, field, rule) for name in sorted(CONFIGS) for field, rule in sorted(RULES[name].items()) if rule.is_written
]
PATHS = {name: path for path, name in settings._SECTIONS.items()}


def unknown(found: Fields) -> list[str]:
    """List the classes and fields that the table lacks."""
    fields = [f"{name}.{field}" for name in found for field in found[name] if field not in RULES.get(name, {})]
    return [name for name in found if name not in RULES] + fields


@pytest.mark.parametrize("version", [version.name for version in VERSIONS])
def test_every_field_of_every_version_has_a_treatment(version: str) -> None:
    """A field that fails here must be examined: does it change KV? Then it belongs into ``glue/fields.py``."""
    assert unknown(recorded()[version]) == []


def test_every_field_of_the_installed_version_has_a_treatment() -> None:
    found = fields_of(installed())
    assert unknown(found) == []
    version = next((name for name in recorded() if vllm.__version__.startswith(f"{name}.")), None)
    assert version is None or found == recorded()[version], "record it anew: python -m support.vllm_fields"


def test_no_treatment_of_a_field_that_no_version_has() -> None:
    known = {(name, field) for found in recorded().values() for name in found for field in found[name]}
    assert {(name, field) for name, rules in RULES.items() for field in rules} == known
    assert set(RULES) == {name for found in recorded().values() for name in found}


def test_the_files_tell_the_fields_that_the_classes_have() -> None:
    found = fields_of(installed())
    for name in CONFIGS & {"ModelConfig", "CacheConfig", "ParallelConfig", "SpeculativeConfig", "LoRAConfig"}:
        declared = {field.name for field in dataclasses.fields(getattr(vllm.config, name))}
        assert declared == set(found[name])


def test_what_does_not_count_says_why() -> None:
    rules = [rule for known in RULES.values() for rule in known.values()]
    assert all(rule.why for rule in rules if not rule.is_written)
    assert {rule.treatment for rule in rules} == set(Treatment)
    assert all(rule.treatment is Treatment.NAMESPACE for rule in rules if rule.is_written)


# -- what is written ---------------------------------------------------------------------------------------------------


def named(config: Any, *groups: KVCacheGroupSpec) -> dict[str, str]:
    return settings_of(config, cache_config(*groups))


def with_section(name: str, **fields: Any) -> Any:
    """Return a worker's configuration whose section of this name has these fields."""
    config = worker_config()
    section = config
    for part in PATHS.get(name, "").split(".") if PATHS.get(name) else ():
        if getattr(section, part, None) is None:
            setattr(section, part, SimpleNamespace())
        section = getattr(section, part)
    vars(section).update(fields)
    return config


@pytest.mark.parametrize(("name", "field", "rule"), WRITTEN, ids=[f"{name}.{field}" for name, field, _ in WRITTEN])
def test_a_written_field_makes_another_namespace(name: str, field: str, rule: Rule, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text("[1]")
    plain = named(with_section(name))
    for neutral in rule.unless:
        value = torch.float32 if neutral is MODEL_DTYPE else neutral
        assert named(with_section(name, **{field: value})) == plain
    changed = named(with_section(name, **{field: str(file) if rule.names_file else "another"}))
    key = rule.why or f"{name}.{field}"
    assert {one for one in plain | changed if plain.get(one) != changed.get(one)} == {key}
    if rule.names_file:
        file.write_text("[2]")
        assert named(with_section(name, **{field: str(file)}))[key] != changed[key]
        with pytest.raises(ConfigError, match=field):
            named(with_section(name, **{field: str(tmp_path / "none")}))


def test_what_nobody_sets_is_not_written() -> None:
    """Engines without a setting share KV with kvstores that did not know it."""
    assert set(named(worker_config())) == {"dtype", "quantization", "kv_cache_dtype"}


def test_a_list_is_written_as_a_digest_without_its_secrets() -> None:
    shown = named(with_section("LoadConfig", model_loader_extra_config={"s3_secret": "hunter2"}))
    assert len(shown["LoadConfig.model_loader_extra_config"]) == 16


def test_states_of_another_type_or_shape_make_another_namespace() -> None:
    """The same bytes stand for another state (``--mamba-ssm-cache-dtype``)."""

    def states(**change: Any) -> dict[str, str]:
        layer = dataclasses.replace(mamba(), **change)
        return named(worker_config(), KVCacheGroupSpec(["layer.0"], spec()), KVCacheGroupSpec(["layer.1"], layer))

    changes: list[dict[str, Any]] = [
        {},
        {"dtypes": (torch.float16,)},
        {"dtypes": (torch.bfloat16,)},
        {"shapes": ((4, 1),)},
    ]
    found = [states(**change) for change in changes]
    assert len({one["states"] for one in found}) == len(changes)
    assert states(mamba_cache_mode="none", page_size_padded=4096) == states()


# -- what a newer vLLM has ---------------------------------------------------------------------------------------------


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a field out of the table, as if a newer vLLM had added it."""
    known = {field: rule for field, rule in RULES["CacheConfig"].items() if field != "kv_offloading_size"}
    monkeypatch.setattr(settings, "RULES", MappingProxyType({**RULES, "CacheConfig": known}))


@pytest.mark.usefixtures("forgotten")
def test_an_unknown_field_is_written_if_it_is_set(caplog: pytest.LogCaptureFixture) -> None:
    config = worker_config()
    config.cache_config = CacheConfig(block_size=16)
    plain = named(config)
    assert not any("kv_offloading_size" in key for key in plain)
    assert not caplog.records
    config.cache_config.kv_offloading_size = 2.0
    with caplog.at_level(logging.WARNING):
        assert named(config) == {**plain, "CacheConfig.kv_offloading_size": "2.0"}
    assert "does not know vLLM's CacheConfig.kv_offloading_size" in caplog.text


@pytest.mark.usefixtures("forgotten")
def test_an_unknown_field_that_cannot_be_compared_is_refused() -> None:
    config = worker_config()
    config.cache_config = CacheConfig(block_size=16)
    config.cache_config.kv_offloading_size = object()
    with pytest.raises(ConfigError, match=r"CacheConfig\.kv_offloading_size .*object has no stable text"):
        named(config)


@dataclasses.dataclass(frozen=True)
class NewerSpec(KVCacheSpec):  # type: ignore[misc] # vLLM has no types here
    """A spec with a field that a newer vLLM may have."""

    turns: int = 1


def test_an_unknown_kind_of_layer_is_written_with_its_fields() -> None:
    found = [
        named(worker_config(), KVCacheGroupSpec(["layer.0"], one)).get("states")
        for one in (spec(), NewerSpec(block_size=16), NewerSpec(block_size=16, turns=2))
    ]
    assert found[0] is None
    assert len(set(found)) == 3


class NewerMethod(QuantizationConfig):  # type: ignore[misc]
    """A plugin's quantization method, which has read the model's configuration."""

    def __init__(self, ignored: object) -> None:
        super().__init__()
        self.ignored = ignored

    get_name = get_supported_act_dtypes = get_quant_method = classmethod(lambda *_: None)
    get_min_capability = get_config_filenames = from_config = classmethod(lambda *_: None)


def test_an_unknown_quantization_method_is_written_by_its_name() -> None:
    config = worker_config()
    config.quant_config = NewerMethod(object())
    assert named(config)["QuantizationConfig.class"] == "NewerMethod"


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ({"a": 1, "b": [2]}, {"b": (2,), "a": 1}, True),
        ({"x", "y", "z"}, {"z", "y", "x"}, True),
        (Treatment.KEY, Treatment.REFUSED, False),
        (torch.float16, torch.bfloat16, False),
        ({1: "a"}, {"1": "a"}, False),
        (True, 1, False),
        (Path, Rule, False),
        (Rule(Treatment.KEY, "a"), Rule(Treatment.KEY, "b"), False),
        (Path("/a"), Path("/b"), False),
    ],
)
def test_equal_values_and_only_they_have_equal_texts(one: object, other: object, *, are_equal: bool) -> None:
    assert (settings.text_of(one) == settings.text_of(other)) is are_equal


def nested(levels: int) -> Mapping[str, object]:
    return {"inner": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "value", [object(), lambda: None, [torch.zeros(1)], nested(20)], ids=["object", "function", "tensor", "nested"]
)
def test_what_has_no_stable_text_is_told(value: object) -> None:
    with pytest.raises(TypeError):
        settings.text_of(value)
