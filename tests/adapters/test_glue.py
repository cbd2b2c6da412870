"""Translation of vLLM's objects: refusals at start, options passed on, and the namespace of the KV."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from support.vllm_objects import (
    BLOCK,
    CONFIG,
    cache_config,
    configured,
    hybrid,
    spec,
    vllm_config,
    windowed,
    worker_config,
)
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
)

from kvstore.adapters.vllm.glue import capabilities, support
from kvstore.adapters.vllm.glue.interface import TESTED
from kvstore.adapters.vllm.glue.namespace import namespace_of
from kvstore.adapters.vllm.glue.options import engine_options, remote_options, scheduler_options, worker_options
from kvstore.adapters.vllm.glue.parallel import port_of, rank_of
from kvstore.adapters.vllm.glue.support import check_supported, frees_blocks, overwrites_early
from kvstore.adapters.vllm.requests.tracker import SaveRules
from kvstore.adapters.vllm.scheduler.options import SchedulerOptions
from kvstore.config.schema import StoreConfig
from kvstore.model.errors import ConfigError
from kvstore.model.keys import Namespace

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("drafts", [False, True])
def test_layers_are_followed_if_asked_for_and_there_is_no_draft_model(*, drafts: bool) -> None:
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    config = StoreConfig(chunk_size=4 * BLOCK, use_layerwise=True)
    vllm_config = configured(transfer, drafts=drafts)
    rules = scheduler_options(vllm_config, cache_config(), config).load_rules
    assert (rules.async_load, rules.runs_ahead, rules.layerwise) == (None, True, not drafts)
    options = worker_options(vllm_config, cache_config(), config)
    assert options.layerwise is not drafts
    assert options.names_layers_early is drafts
    assert options.layer_names == ("layer.0",)
    assert options.async_save is not vllm.platforms.current_platform.is_cpu()


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_supported_set_up_passes() -> None:
    check_supported(vllm_config(), cache_config(), CONFIG)


def test_fail_policy_is_refused_with_the_flag_to_add() -> None:
    with pytest.raises(ConfigError, match='"kv_load_failure_policy":"recompute"'):
        check_supported(vllm_config(policy="fail"), cache_config(), CONFIG)


def test_a_producer_does_not_load_so_its_policy_does_not_matter() -> None:
    check_supported(vllm_config(policy="fail", consumer=False), cache_config(), CONFIG)


@pytest.mark.parametrize(("dcp", "pcp"), [(2, 1), (1, 2)])
def test_context_parallelism_is_refused(dcp: int, pcp: int) -> None:
    with pytest.raises(ConfigError, match="context-parallel-size"):
        check_supported(vllm_config(dcp=dcp, pcp=pcp), cache_config(), CONFIG)


def test_with_a_window_loads_go_beside_the_steps() -> None:
    """A load within a step could not be recomputed after a failure, because the blocks before are gone."""
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    for found, async_load in ((windowed(), True), (hybrid(), True), (cache_config(), None)):
        assert frees_blocks(found) is (async_load is True)
        assert scheduler_options(configured(transfer), found, CONFIG).load_rules.async_load is async_load
    check_supported(vllm_config(), windowed(), CONFIG)
    within = StoreConfig(chunk_size=4 * BLOCK, enable_async_loading=False)
    check_supported(vllm_config(), cache_config(), within)
    check_supported(vllm_config(consumer=False), windowed(), within)
    with pytest.raises(ConfigError, match="enable_async_loading is false, and the layers of this model attend to a w"):
        check_supported(vllm_config(), windowed(), within)


def test_blocks_may_be_overwritten_before_the_connector_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model runner V2 zeroes blocks when it takes in a step, if layers differ in precision."""
    half = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    mixed = cache_config(KVCacheGroupSpec(["layer.0"], spec()), KVCacheGroupSpec(["layer.1"], half))
    first, second, silent = (SimpleNamespace(use_v2_model_runner=v2) for v2 in (False, True, True))
    del silent.use_v2_model_runner
    monkeypatch.setattr(vllm, "__version__", TESTED[-1])  # an untested version is assumed to do the worst
    assert [overwrites_early(runner, mixed) for runner in (first, second, silent)] == [False, True, True]
    assert not overwrites_early(second, cache_config())
    assert overwrites_early(second, SimpleNamespace())  # a version that does not tell
    monkeypatch.setattr(vllm, "__version__", "1.0")
    assert overwrites_early(first, cache_config())


def test_a_bound_of_loads_below_a_block_is_refused() -> None:
    config = StoreConfig(chunk_size=4 * BLOCK, max_tokens_per_load=BLOCK - 1)
    with pytest.raises(ConfigError, match="max_tokens_per_load 15 is less than vLLM's block size 16"):
        check_supported(vllm_config(), cache_config(), config)


@pytest.mark.parametrize(
    ("role", "skip", "loads", "saves"),
    [
        ("kv_both", False, True, True),
        ("kv_producer", False, False, True),
        ("kv_consumer", False, True, False),
        ("kv_both", True, True, False),
        ("kv_producer", True, False, False),
    ],
)
def test_roles(role: str, *, skip: bool, loads: bool, saves: bool) -> None:
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role=role)
    config = StoreConfig(force_skip_save=skip, discard_partial_chunks=True, skip_last_n_tokens=3, priority_limit=2)
    options = scheduler_options(configured(transfer), cache_config(), config)
    assert (options.loads, options.saves) == (loads, saves)
    assert not options.announces
    assert options.rules == SaveRules(BLOCK, 256, save_decode=False, save_tails=False, skip_last_tokens=3)
    assert options.config is config


@pytest.mark.parametrize("is_diffusion", [True, False])
def test_generated_tokens_of_diffusion_models_are_not_stored(*, is_diffusion: bool) -> None:
    """A request that only reads them ends before the step that computes their KV."""
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both"))
    config.model_config.is_diffusion = is_diffusion
    rules = scheduler_options(config, cache_config(), StoreConfig(save_decode_cache=True)).rules
    assert rules.save_decode is not is_diffusion


@pytest.mark.parametrize("enabled", [True, False])
def test_events_are_made_if_vllm_publishes_them(*, enabled: bool) -> None:
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both")
    events = KVEventsConfig(enable_kv_cache_events=enabled, publisher="null")
    options = scheduler_options(configured(transfer, events), cache_config(), CONFIG)
    assert (options.announces is not None) is enabled


def test_an_untested_version_is_refused_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    check_supported(vllm_config(), cache_config(), CONFIG)
    strict = CONFIG.model_copy(update={"allow_untested_vllm": False})
    with pytest.raises(ConfigError, match=r"0\.99\.0.*0\.32.*allow_untested_vllm"):
        check_supported(vllm_config(), cache_config(), strict)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_sleep_that_is_not_told_of_is_refused_on_a_device(monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool) -> None:
    monkeypatch.setattr(support, "FOUND", {**capabilities.FOUND, capabilities.SLEEPS: False})
    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: on_cpu)
    sleepy = vllm_config(sleep=True)
    refused: Any = pytest.raises(ConfigError, match=r"use vLLM 0\.33")
    with nullcontext() if on_cpu else refused:
        check_supported(sleepy, cache_config(), CONFIG)
    monkeypatch.setattr(support, "FOUND", {**capabilities.FOUND, capabilities.SLEEPS: True})
    check_supported(sleepy, cache_config(), CONFIG.model_copy(update={"max_local_gpu_size": 1.0}))


# -- namespaces and shards ------------------------------------------------------------------------------------------


def namespace(config: Any, replicas: int = 1) -> bytes:
    cache = cache_config()
    cache.kv_tp_replicas = replicas
    paged: Any = SimpleNamespace(layout=SimpleNamespace(fingerprint="0" * 16))
    return namespace_of(config, cache, StoreConfig(model_id="mine"), paged).id


def one_change_each() -> dict[str, dict[str, Any]]:
    """Return for each field of a namespace a change that makes it another one."""
    return {
        "model": {"model_id": "another"},
        "model_config": {"hf_config": SimpleNamespace(to_dict=lambda: {"hidden": 9})},
        "dtype": {"dtype": torch.bfloat16},
        "quantization": {"quantization": "fp8"},
        "kv_cache_dtype": {"cache_dtype": "fp8"},
        "draft": {"draft": "hub/draft"},
        "layers": {"layers": ["layer.1"]},
        "shard": {"tp": 2},
        "chunk_tokens": {"chunk_size": 512},
        "layout": {"fingerprint": "1" * 16},
    }


def fields_of(changes: dict[str, Any]) -> Namespace:
    """Return the namespace of a worker that differs from the plain one in some fields."""
    config = worker_config(tp=changes.get("tp", 1), draft=changes.get("draft"))
    for part in (config.model_config, config.cache_config):
        vars(part).update({name: value for name, value in changes.items() if name in vars(part)})
    paged: Any = SimpleNamespace(layout=SimpleNamespace(fingerprint=changes.get("fingerprint", "0" * 16)))
    cache = cache_config(KVCacheGroupSpec(changes.get("layers", ["layer.0"]), spec()))
    store = StoreConfig(model_id=changes.get("model_id", "mine"), chunk_size=changes.get("chunk_size", 256))
    return namespace_of(config, cache, store, paged)


@pytest.mark.parametrize("field", one_change_each())
def test_whatever_makes_kv_another_makes_another_namespace(field: str) -> None:
    plain, changed = fields_of({}), fields_of(one_change_each()[field])
    assert plain.differing_fields(changed) == [field]
    assert plain.id != changed.id


def test_no_field_of_a_namespace_is_left_out_of_the_test_before() -> None:
    assert set(fields_of({}).fields) == {"format", *one_change_each()}


def test_every_shard_has_a_namespace_of_its_own() -> None:
    ranks = [namespace(worker_config(rank=rank, tp=2, pp=2)) for rank in range(4)]
    assert len(set(ranks)) == 4
    assert namespace(worker_config(rank=5, tp=2, pp=2)) == ranks[1], "of another data-parallel replica"
    assert namespace(worker_config(tp=2)) != namespace(worker_config(tp=1))


def test_every_worker_has_a_folder_of_its_own() -> None:
    def folder(rank: int, tp: int, replica: int, replicas: int) -> tuple[Path, ...]:
        config = worker_config(rank=rank, tp=tp)
        config.parallel_config.data_parallel_rank = replica
        config.parallel_config.data_parallel_size = replicas
        store = CONFIG.model_copy(update={"local_disk": "/cache", "max_local_disk_size": 1.0})
        return engine_options(config, cache_config(), store).local_disk  # type: ignore[return-value]

    assert folder(0, 1, 0, 1) == (Path("/cache"),)
    workers = [folder(rank, 2, replica, 2) for replica in range(2) for rank in range(2)]
    assert len(set(workers)) == 4
    assert len({folder(0, 1, replica, 2) for replica in range(2)}) == 2


@pytest.mark.parametrize(("tp", "replicas", "shards"), [(4, 4, 1), (4, 2, 2), (4, 1, 4)], ids=["MLA", "2 heads", "4"])
def test_ranks_that_hold_the_same_share_a_namespace_and_one_sends(tp: int, replicas: int, shards: int) -> None:
    if not capabilities.FOUND[capabilities.COUNTS_REPLICAS]:
        replicas, shards = 1, tp  # vLLM does not tell
    configs = [worker_config(rank=rank, tp=tp) for rank in range(tp)]
    assert len({namespace(config, replicas) for config in configs}) == shards
    cache = cache_config()
    cache.kv_tp_replicas = replicas
    store = StoreConfig(remote_url="redis://host", local_disk="/disk", max_local_disk_size=1.0)
    options = [engine_options(config, cache, store) for config in configs]
    assert [options.remote.sends for options in options if options.remote] == (
        [True] + [False] * (replicas - 1)
    ) * shards
    assert len({options.local_disk for options in options}) == tp, "a folder has one owner"


def test_the_draft_model_counts_and_so_do_its_weights(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    found = {namespace(worker_config()), namespace(worker_config(draft="hub/draft"))}
    for content in (b"12345678", b"123456789"):
        (draft / "model.safetensors").write_bytes(content)
        found.add(namespace(worker_config(draft=str(draft))))
    assert len(found) == 4


@pytest.mark.parametrize(("serde", "codec"), [("naive", None), ("kivi", None), ("split", "split")])
def test_the_codec_of_the_remote_tier_is_passed_on(serde: str, codec: str | None) -> None:
    options = remote_options(StoreConfig(remote_url="redis://host", remote_serde=serde))
    assert options is not None
    assert options.settings.get("codec") == codec


def drafting(method: str | None, *, is_eagle: bool = False, **store: Any) -> SchedulerOptions:
    """Return the options with such speculation, if any."""
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both"))
    config.speculative_config = method and SimpleNamespace(method=method, use_eagle=lambda: is_eagle)
    return scheduler_options(config, cache_config(), StoreConfig(**store))


def test_layers_of_eagle_and_mtp_look_ahead() -> None:
    assert drafting("mtp", is_eagle=True).rules.lookahead_tokens == 1, "before vLLM names the number"
    assert not any(drafting(method).rules.lookahead_tokens for method in ("draft_model", "ngram", None))


@pytest.mark.parametrize(("asked", "skipped"), [(0, 2), (5, 5)])
def test_tokens_that_several_modules_compute_again_are_not_stored(asked: int, skipped: int) -> None:
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both"), drafts=True)
    config.num_prefill_lookahead_tokens = 3
    rules = scheduler_options(config, cache_config(), StoreConfig(skip_last_n_tokens=asked)).rules
    assert (rules.lookahead_tokens, rules.skip_last_tokens) == (3, skipped)


@pytest.mark.parametrize("is_eagle", [False, True])
def test_hits_are_not_verified_where_layers_look_ahead(caplog: pytest.LogCaptureFixture, *, is_eagle: bool) -> None:
    """A chunk that another prompt stored deviates at its last token, and would be removed everywhere."""
    options = drafting("eagle3", is_eagle=is_eagle, verify_fraction=0.5)
    assert options.config.verify_fraction == (0.0 if is_eagle else 0.5)
    assert ("verify_fraction is ignored" in caplog.text) is is_eagle


# -- other engines ----------------------------------------------------------------------------------------------------

KEY_FILES: dict[str, Any] = {"remote_key_file": "/k/client.key", "remote_server_key_file": "/k/server.pub"}


def test_an_engine_that_listens_has_its_own_server_for_a_remote_tier() -> None:
    store = StoreConfig(enable_pd=True, pd_peer_init_port=7300, **KEY_FILES)
    options = engine_options(worker_config(rank=1, tp=2), cache_config(), store).remote
    assert options is not None
    assert (options.url, options.peers, options.rank, options.sends, options.max_queue) == (None, (), 1, True, None)
    assert "client_key_file" not in options.settings, "its own processes come through a private folder"
    assert options.peer_settings["client_key_file"] == "/k/client.key"
    assert options.peer_settings["timeout_s"] == options.settings["timeout_s"] == 10.0


def test_an_engine_that_listens_reads_the_shared_tier_beside_its_own_server() -> None:
    """It has its own login and no bound, as nothing is sent there."""
    store = StoreConfig(enable_pd=True, pd_peer_init_port=7300, remote_url="redis://h", remote_password="p")
    options = remote_options(store)
    assert options is not None
    assert (options.url, options.shared, options.peers, options.max_queue) == (None, "redis://h", (), None)
    assert options.shared_settings["password"] == "p"
    assert "password" not in options.settings
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_consumer"))
    config.parallel_config = worker_config().parallel_config
    config.parallel_config.data_parallel_rank = 0
    transfer = scheduler_options(config, cache_config(), store).handover
    assert transfer is not None
    assert (transfer.own, transfer.shared) == (("127.0.0.1", 7300), "redis://h")


def test_peers_beside_redis_and_without() -> None:
    alone = remote_options(StoreConfig(peers=("kvs://a:1",)))
    assert alone is not None
    assert (alone.url, alone.peers, alone.max_queue) == (None, ("kvs://a:1",), 0)
    beside = remote_options(StoreConfig(peers=("kvs://a:1",), remote_url="redis://h", remote_password="p"))
    assert beside is not None
    assert (beside.url, beside.max_queue) == ("redis://h", None)
    assert "password" in beside.settings
    assert "password" not in beside.peer_settings
    plain = remote_options(StoreConfig(remote_url="redis://h"))
    assert plain is not None
    assert plain.peers is None
    assert remote_options(StoreConfig()) is None


def test_milliseconds_of_the_configuration_are_seconds_inside() -> None:
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_both"))
    store = StoreConfig(enable_pd=True, lookup_timeout_ms=250, pd_timeout_ms=4500, remote_url="redis://h")
    options = scheduler_options(config, cache_config(), store)
    assert options.remote is not None
    assert options.remote.lookup_timeout_s == pytest.approx(0.25)
    assert options.handover is not None
    assert options.handover.timeout_s == pytest.approx(4.5)


def test_engines_that_requests_may_name() -> None:
    """Sources count only with `pd_bidirectional`, and each with its port; a peer is read anyway."""
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role="kv_producer"))
    listed: dict[str, Any] = {
        "enable_pd": True,
        "pd_allowed_hosts": ("Decode-1:7300", "decode-2"),
        "peers": ("kvs://decode-3:7300",),
    }
    for both_ways, sources in ((True, ("kvs://decode-1:7300",)), (False, ())):
        options = scheduler_options(config, cache_config(), StoreConfig(**listed, pd_bidirectional=both_ways))
        assert options.remote is not None
        assert options.remote.sources == sources
        assert options.handover is not None
        places = [("DECODE-1", 7300), ("decode-3", 7300), ("decode-1", 7301), ("decode-2", 7300), ("127.0.0.1", 7300)]
        allowed = [options.handover.allows_source(host, port) for host, port in places]
        assert allowed == [both_ways, both_ways, False, False, False]


def test_of_ranks_that_hold_the_same_each_fills_its_own_server() -> None:
    cache = cache_config()
    cache.kv_tp_replicas = 2
    store = StoreConfig(enable_pd=True, pd_peer_init_port=7300)
    options = [engine_options(worker_config(rank=rank, tp=2), cache, store).remote for rank in range(2)]
    assert [option.sends for option in options if option] == [True, True]


@pytest.mark.parametrize(
    ("given", "rank", "replica", "port"),
    [(7300, 0, 0, 7300), (7300, 3, 0, 7303), (7300, 1, 2, 7309), ((7300, 8000), 1, 0, 8000), ((7300,), 0, 0, 7300)],
)
def test_the_port_of_a_worker(given: int | tuple[int, ...], rank: int, replica: int, port: int) -> None:
    config = worker_config(rank=rank, tp=2, pp=2)
    config.parallel_config.data_parallel_rank = replica
    store_config = StoreConfig(enable_pd=True, pd_peer_init_port=given)
    assert port_of(config, store_config, rank_of(config)) == port


def test_a_worker_without_a_port() -> None:
    config = worker_config(rank=1, tp=2)
    config.parallel_config.data_parallel_rank = 0
    with pytest.raises(ConfigError, match="pd_peer_init_port lists 1 ports, but none for worker 1"):
        port_of(config, StoreConfig(enable_pd=True, pd_peer_init_port=(7300,)), rank=1)


@pytest.mark.parametrize(
    ("pd_role", "kv_role", "warns"),
    [("sender", "kv_producer", False), ("receiver", "kv_both", True), (None, "kv_both", False)],
)
def test_the_role_is_vllms(pd_role: str | None, kv_role: str, caplog: pytest.LogCaptureFixture, *, warns: bool) -> None:
    config = configured(KVTransferConfig(kv_connector="KVStoreConnector", kv_role=kv_role))
    scheduler_options(config, cache_config(), StoreConfig(enable_pd=True, pd_role=pd_role))
    assert ("pd_role" in caplog.text) is warns


@pytest.mark.parametrize("store", [{"enable_pd": True}, {"peers": ("kvs://a:1",)}])
def test_what_comes_from_elsewhere_is_not_waited_for_while_vllm_runs_ahead(store: dict[str, Any]) -> None:
    config = vllm_config()
    config.scheduler_config.async_scheduling = True
    with pytest.raises(ConfigError, match=next(iter(store))):
        check_supported(config, cache_config(), StoreConfig(enable_async_loading=False, **store))
