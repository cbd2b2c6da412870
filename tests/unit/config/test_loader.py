"""Sources of the configuration's values, and the treatment of LMCache's keys."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kvstore.config import LoadedConfig, StoreConfig, load_config
from kvstore.config.lmcache import EXTRA_CONFIG_KEYS, NOT_IMPLEMENTED
from kvstore.config.reference import KEYS
from kvstore.config.sources import OTHER_VARIABLES
from kvstore.format.codecs import CODEC_NAMES
from kvstore.model.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kv.yaml"


def load_text(file: Path, text: str | bytes) -> LoadedConfig:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path=file, environ={})


class TestSources:
    def test_defaults(self) -> None:
        loaded = load_config(environ={})
        assert loaded.config == StoreConfig()
        assert set(loaded.origins.values()) == {"default"}
        assert loaded.warnings == ()

    def test_precedence(self, file: Path) -> None:
        file.write_text("chunk_size: 1")
        environ = {"KVSTORE_CONFIG_FILE": str(file)}
        extra: dict[str, object] = {}
        assert load_config(extra, environ=environ).config.chunk_size == 1
        environ["LMCACHE_CHUNK_SIZE"] = "2"
        assert load_config(extra, environ=environ).config.chunk_size == 2
        environ["KVSTORE_CHUNK_SIZE"] = "3"
        assert load_config(extra, environ=environ).config.chunk_size == 3
        extra["lmcache.chunk_size"] = 4
        assert load_config(extra, environ=environ).config.chunk_size == 4
        extra["kvstore.chunk_size"] = 5
        assert load_config(extra, environ=environ).config.chunk_size == 5

    def test_origins(self, file: Path) -> None:
        file.write_text("# a comment\nchunk_size: 128\nextra_config:\n  use_odirect: false\n")
        environ = {"KVSTORE_LOCAL_CPU": "false", "LMCACHE_MIN_RETRIEVE_TOKENS": "7"}
        origins = load_config({"kvstore.model_id": "m"}, path=file, environ=environ).origins
        assert origins["chunk_size"] == f"file {file}, line 2"
        assert origins["use_odirect"] == f"file {file}, line 3, in extra_config"
        assert origins["local_cpu"] == "environment KVSTORE_LOCAL_CPU"
        assert origins["min_retrieve_tokens"] == "environment LMCACHE_MIN_RETRIEVE_TOKENS"
        assert origins["model_id"] == "kv_connector_extra_config kvstore.model_id"
        assert origins["disk_io_threads"] == "default"
        assert set(origins) == set(StoreConfig.model_fields)

    def test_which_file(self, tmp_path: Path) -> None:
        ours, theirs, given_path = (tmp_path / name for name in ("ours.yaml", "theirs.yaml", "given.yaml"))
        for number, path in enumerate((ours, theirs, given_path), start=1):
            path.write_text(f"chunk_size: {number}")
        environ = {"LMCACHE_CONFIG_FILE": str(theirs), "KVSTORE_CONFIG_FILE": ""}
        assert load_config(environ=environ).config.chunk_size == 2
        environ["KVSTORE_CONFIG_FILE"] = str(ours)
        assert load_config(environ=environ).config.chunk_size == 1
        assert load_config(path=given_path, environ=environ).config.chunk_size == 3

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_CHUNK_SIZE", "48")
        assert load_config().config.chunk_size == 48

    @pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null", "{}"])
    def test_an_empty_file_gives_the_defaults(self, file: Path, text: str) -> None:
        assert load_text(file, text).config == StoreConfig()

    def test_json_is_yaml(self, file: Path) -> None:
        assert load_text(file, '{"chunk_size": 64, "local_cpu": false}').config.chunk_size == 64

    def test_others_extra_config_is_left_alone(self) -> None:
        assert load_config({"block_size": 1, "nixl.chunk_size": 2, "chunk_size": "x"}, environ={}).warnings == ()

    def test_extra_config_is_weaker_than_the_key_beside_it(self, file: Path) -> None:
        text = "disk_io_threads: 2\nextra_config: {disk_io_threads: 3, use_odirect: true}"
        config = load_text(file, text).config
        assert (config.disk_io_threads, config.use_odirect) == (2, True)
        environ = {"LMCACHE_DISK_IO_THREADS": "5", "KVSTORE_EXTRA_CONFIG": '{"disk_io_threads": 6}'}
        assert load_config(path=file, environ=environ).config.disk_io_threads == 6


class TestEnvironment:
    @pytest.mark.parametrize(
        ("variable", "text", "value"),
        [
            ("LOCAL_CPU", "false", False),
            ("LOCAL_CPU", "True", True),
            ("CHUNK_SIZE", "512", 512),
            ("MAX_LOCAL_CPU_SIZE", "2", 2.0),
            ("MAX_LOCAL_CPU_SIZE", "0.5", 0.5),
            ("USE_ODIRECT", "null", None),
            ("MODEL_ID", "0123", "0123"),
            ("MODEL_ID", "a: [b # c", "a: [b # c"),
            ("MODEL_ID", "null", None),
            ("CHUNK_SIZE", "", 256),
        ],
    )
    def test_parsing(self, variable: str, text: str, value: object) -> None:
        config = load_config(environ={f"KVSTORE_{variable}": text}).config
        assert getattr(config, variable.lower()) == value

    def test_null_unsets_a_path_of_the_file(self, file: Path) -> None:
        file.write_text("local_disk: /data\nmax_local_disk_size: 1")
        config = load_config(path=file, environ={"KVSTORE_LOCAL_DISK": "null"}).config
        assert config.local_disk is None

    @pytest.mark.parametrize(
        ("variable", "text", "parts"),
        [
            ("KVSTORE_CHUNKSIZE", "1", ["environment KVSTORE_CHUNKSIZE", '"1"', "did you mean chunk_size?"]),
            ("KVSTORE_CHUNK_SIZE", "many", ["environment KVSTORE_CHUNK_SIZE: chunk_size", '"many"', "whole number"]),
            ("LMCACHE_CHUNK_SIZE", "1.5", ["environment LMCACHE_CHUNK_SIZE: chunk_size: 1.5", "whole number"]),
            ("KVSTORE_CHUNK_SIZE", "[1", ["environment KVSTORE_CHUNK_SIZE: chunk_size: not valid YAML: line 1"]),
            ("KVSTORE_LOCAL_CPU", "1", ["must be true or false"]),
            ("KVSTORE_EXTRA_CONFIG", "3", ["extra_config: 3: must be a mapping"]),
        ],
    )
    def test_errors(self, variable: str, text: str, parts: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(environ={variable: text})
        for part in parts:
            assert part in str(caught.value)

    def test_variables_that_are_read_elsewhere(self) -> None:
        environ = dict.fromkeys(OTHER_VARIABLES - {"KVSTORE_CONFIG_FILE", "LMCACHE_CONFIG_FILE"}, "1")
        assert load_config(environ=environ).warnings == ()

    def test_variables_that_kubernetes_sets_for_a_service_called_kvstore(self) -> None:
        address = "tcp://10.0.0.1:6379"
        environ = {
            "KVSTORE_SERVICE_HOST": "10.0.0.1",
            "KVSTORE_SERVICE_PORT": "6379",
            "KVSTORE_SERVICE_PORT_HTTP": "6379",
            "KVSTORE_PORT": address,
            "KVSTORE_PORT_6379_TCP": address,
            "KVSTORE_PORT_6379_TCP_PROTO": "tcp",
            "KVSTORE_REDIS_PORT": address,
        }
        assert load_config(environ=environ).warnings == ()

    def test_lmcache_variables_that_are_no_keys(self) -> None:
        assert load_config(environ={"LMCACHE_LOG_LEVEL": "INFO", "LMCACHE_USE_EXPERIMENTAL": "True"}).warnings == ()
        (typo,) = load_config(environ={"LMCACHE_CHUNKSIZE": "1"}).warnings
        assert "LMCACHE_CHUNKSIZE" in typo
        assert typo.endswith("did you mean chunk_size?")


class TestLMCache:
    @pytest.mark.parametrize("variable", ["KVSTORE_FORCE_SKIP_SAVE", "LMCACHE_FORCE_SKIP_SAVE"])
    @pytest.mark.parametrize(("text", "skips"), [("true", True), ("1", True), ("False", False), ("0", False)])
    def test_saving_is_switched_off_by_a_variable(self, variable: str, text: str, *, skips: bool) -> None:
        assert load_config(environ={variable: text}).config.force_skip_save is skips

    def test_what_lmcache_reads_without_a_prefix(self) -> None:
        extra = {"discard_partial_chunks": True, "skip_last_n_tokens": 1, "chunk_size": "vLLM's own"}
        loaded = load_config(extra, environ={"KVSTORE_SKIP_LAST_N_TOKENS": "2"})
        assert loaded.config.skip_last_n_tokens == 1
        assert not loaded.config.saves_tails
        assert loaded.origins["skip_last_n_tokens"] == "kv_connector_extra_config skip_last_n_tokens"
        assert load_config({**extra, "kvstore.skip_last_n_tokens": 3}, environ={}).config.skip_last_n_tokens == 3

    @pytest.mark.parametrize("key", sorted(NOT_IMPLEMENTED))
    def test_each_key_is_accepted_with_one_warning(self, key: str, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="kvstore.config"):
            loaded = load_config({f"lmcache.{key}": "something"}, environ={})
        assert loaded.config == StoreConfig()
        expected = f"kv_connector_extra_config lmcache.{key}: {key}: ignored: {NOT_IMPLEMENTED[key]}"
        assert loaded.warnings == (expected,)
        assert caplog.messages == [expected]

    def test_no_key_is_ours_and_theirs(self) -> None:
        assert not NOT_IMPLEMENTED.keys() & set(KEYS)
        assert set(KEYS) >= EXTRA_CONFIG_KEYS

    @pytest.mark.parametrize("value", ["false", "null", "0", "[]", "''"])
    def test_a_feature_switched_off_does_not_warn(self, file: Path, value: str) -> None:
        assert load_text(file, f"enable_blending: {value}\nenable_p2p: {value}").warnings == ()

    def test_what_we_do_anyway_does_not_warn(self, file: Path) -> None:
        assert load_text(file, "cache_policy: LRU\nremote_serde: naive").warnings == ()
        assert len(load_text(file, "cache_policy: MRU\nremote_serde: cachegen").warnings) == 2
        with pytest.raises(ConfigError, match='cache_policy: "clock": must be one of LRU, LFU'):
            load_text(file, "cache_policy: clock")

    @pytest.mark.parametrize("name", ["naive", "none", "lz4", "split", "int8", "null", "''"])
    def test_codecs_of_the_remote_tier(self, file: Path, name: str) -> None:
        loaded = load_text(file, f"remote_serde: {name}")
        assert loaded.warnings == ()
        assert loaded.config.remote_codec == (name if name in CODEC_NAMES else "none")

    @pytest.mark.parametrize("name", ["cachegen", "kivi"])
    def test_codecs_that_only_lmcache_knows_are_replaced(self, file: Path, name: str) -> None:
        loaded = load_text(file, f"chunk_size: 256\nremote_serde: {name}")
        assert loaded.config.remote_codec == "none"
        (warning,) = loaded.warnings
        assert f"2: remote_serde: kvstore has no codec '{name}': 'none' is used" in warning

    @pytest.mark.parametrize("value", ["zip", "LZ4", "3", "true"])
    def test_codecs_that_nobody_knows_are_refused(self, file: Path, value: str) -> None:
        with pytest.raises(ConfigError, match=r"remote_serde: .*: must be (one of none, lz4, split, int8|text)"):
            load_text(file, f"remote_serde: {value}")

    def test_one_warning_for_a_key_given_twice(self, file: Path) -> None:
        file.write_text("controller_url: tcp://:secret@host")
        (warning,) = load_config(path=file, environ={"LMCACHE_CONTROLLER_URL": "tcp://:secret@host"}).warnings
        assert warning.startswith("environment LMCACHE_CONTROLLER_URL: controller_url: ignored")
        assert "secret" not in warning

    @pytest.mark.parametrize("value", ["null", "''", ""])
    def test_no_remote_url(self, file: Path, value: str) -> None:
        assert load_text(file, f"remote_url: {value}").config.shared_url is None

    def test_the_address_of_each_hosts_server(self, file: Path) -> None:
        text = "remote_url: kvs+ipc:///run/kvstore\nremote_host_url: kvs://me:secret@{host}:5566"
        loaded = load_text(file, text)
        config = loaded.config
        assert config.remote_host_url == "kvs://me:secret@{host}:5566"
        assert [warning.partition("remote_host_url: ")[2][:23] for warning in loaded.warnings] == [
            "without remote_key_file"
        ]
        assert not load_text(file, f"{text}\nremote_key_file: /k\nremote_server_key_file: /s").warnings
        assert config.shown()["remote_host_url"] == "kvs://***@{host}:5566"
        assert load_text(file, "remote_host_url: kvs://{host}:5566").config.remote_host_url is None
        with pytest.raises(ConfigError, match="of the same kind as remote_url"):
            load_text(file, "remote_url: kvs+ipc:///run/kvstore\nremote_host_url: redis://{host}")

    def test_a_remote_url_that_only_lmcache_knows_warns(self, file: Path) -> None:
        loaded = load_text(file, "remote_url: lm://host:1")
        assert loaded.config.shared_url is None
        assert [warning.partition("remote_url: ")[2] for warning in loaded.warnings] == [
            "ignored: kvstore has no tier for it, so nothing is shared: see kvstore config from-lmcache"
        ]

    @pytest.mark.parametrize("value", ["host:6379", "http://host", "redis:/host"])
    def test_a_remote_url_that_nobody_knows_is_refused(self, file: Path, value: str) -> None:
        with pytest.raises(ConfigError, match="must begin with one of redis://, rediss://"):
            load_text(file, f"remote_url: {value}")

    def test_unknown_extra_config_warns_once_each(self, file: Path) -> None:
        loaded = load_text(file, "extra_config: {ping_timeout: 3, use_odirect: true, mystery: 1, off: false}")
        assert loaded.config.use_odirect is True
        assert [warning.split("extra_config: ")[1].split(":")[0] for warning in loaded.warnings] == [
            "ping_timeout",
            "mystery",
        ]

    def test_warnings_may_be_left_to_another_process(self, caplog: pytest.LogCaptureFixture) -> None:
        loaded = load_config({"lmcache.local_disk_path_sharding": "by_gpu"}, environ={}, log_warnings=False)
        assert len(loaded.warnings) == 1
        assert caplog.messages == []


@pytest.mark.parametrize(("value", "meaning"), [(True, True), (False, False), ("auto", None), (None, None)])
def test_a_switch_may_be_left_to_us(value: object, meaning: bool | None) -> None:
    assert load_config({"kvstore.enable_async_loading": value}, environ={}).config.enable_async_loading is meaning


def test_who_listens_reserves_a_buffer_beside_the_pool() -> None:
    sizes = {"max_local_cpu_size": 1, "pd_buffer_size": 2 << 30, "enable_pd": True}
    receiver = {"pd_role": "receiver", "pd_peer_host": "127.0.0.1", "pd_peer_init_port": 7300}
    sender = {"pd_role": "sender"}
    for role, size_gib in ((receiver, 3), (sender, 1)):
        given = {f"kvstore.{key}": value for key, value in (sizes | role).items()}
        assert load_config(given, environ={}).config.host_memory_bytes == size_gib << 30
