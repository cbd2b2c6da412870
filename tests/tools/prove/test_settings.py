"""Flags, configuration and prompts of ``kvstore prove``: the user's, without what is the user's alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.tools.prove.faults import can_start, damage
from kvstore.tools.prove.prompts import LENGTHS, OUTPUT_TOKENS, made_up_prompts, read_own
from kvstore.tools.prove.session import ProvingVllm
from kvstore.tools.prove.settings import Settings, read_settings, scratch_folder, shown_words
from kvstore.tools.prove.situations import Situation

OURS = {"kv_connector": "KVStoreConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}
ALL = """\
max_local_cpu_size: 1
local_disk: {folder}/disk
max_local_disk_size: 2
local_cpu_quotas: '*=0.5'
local_disk_quotas: '*=1'
max_local_gpu_size: 0.5
remote_url: redis://cache:6379
remote_password: s3cret
remote_host_url: redis://cache:6379
record_trace: trace.jsonl
enable_pd: true
pd_peer_init_port: 7300
peers: [kvs://127.0.0.1:7301]
verify_fraction: 0.5
internal_api_server_enabled: true
"""


def settings_of(folder: Path, lines: str = "", *flags: str) -> Settings:
    file = folder / "kvstore.yaml"
    file.write_text(lines or ALL.format(folder=folder))
    return read_settings(["model", *flags], file, "run")


def test_flags_of_the_connector_the_address_and_logs_of_prompts_are_replaced() -> None:
    transfer = json.dumps(OURS)
    words = ["vllm", "serve", "model", "--port", "80", "--dtype", "float32", "--api_key", "a", "b", "--host=::1"]
    words += ["--kv-transfer-config", transfer, "--disable-log-stats", "--enable-log-requests", "-tp", "2"]
    words += ["--kv-events-config", '{"endpoint": "tcp://*:5557"}', "--kv-events-config.topic=a"]
    settings = read_settings(words, None, "run")
    assert settings.words == ("model", "--dtype", "float32", "-tp", "2")
    parts = [f"--kv-transfer-config.{name}" for name in OURS]
    dotted = [word for name, value in zip(parts, OURS.values(), strict=True) for word in (name, value)]
    assert read_settings(["model", *dotted], None, "run").words == ("model",)
    made = settings.transfer_with({"chunk_size": 128})
    assert (made["kv_role"], made["kv_load_failure_policy"]) == ("kv_both", "fail")
    assert made["kv_connector_extra_config"] == {"kvstore.chunk_size": 128}
    assert read_settings(["model"], None, "run").transfer["kv_load_failure_policy"] == "recompute"


def test_settings_in_the_flag_count_and_only_kvstores_connector() -> None:
    mine = OURS | {"kv_connector_extra_config": {"kvstore.chunk_size": 512, "kvstore.max_local_cpu_size": 1}}
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [mine, {}]}}
    for transfer in (mine, several):
        settings = read_settings(["model", "--kv-transfer-config", json.dumps(transfer)], None, "run")
        assert settings.config.chunk_size == 512
        made = settings.transfer_with({"max_local_cpu_size": 2})
        assert made["kv_connector"] == "KVStoreConnector"
        extra = made["kv_connector_extra_config"]
        assert (extra["kvstore.chunk_size"], extra["kvstore.max_local_cpu_size"]) == (512, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the model"),
        (["--dtype", "float32"], "name the model"),
        (["model", "-tp", "many"], "must be a number"),
        (["model", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "another connector"),
        (["model", "--kv-transfer-config", "{"], "is not JSON"),
        (["model", "--config", "vllm.yaml"], "give it as a flag"),
    ],
)
def test_flags_that_cannot_be_used(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vllm.yaml").write_text(f"kv-transfer-config: '{json.dumps(OURS)}'\n")
    with pytest.raises(ConfigError, match=said):
        read_settings(words, None, "run")
    assert run("prove", "--", *words).exit_code == 2
    assert not Path("proof").exists()


def test_changes_can_be_used_and_leave_one_tier(tmp_path: Path) -> None:
    settings, own = settings_of(tmp_path), [tmp_path / "scratch"]
    changes = {
        "memory": settings.only(memory=True),
        "disk": settings.only(folders=own),
        "remote": settings.only(url="redis://cache:6379"),
        "private": settings.only(url="kvs+ipc:///tmp/kvs"),
    }
    for name, changed in changes.items():
        extra = settings.transfer_with(changed)["kv_connector_extra_config"]
        config = load_config(json.loads(json.dumps(extra)), path=settings.file, environ={}, log_warnings=False).config
        tiers = (config.local_cpu, config.local_disk_folders, config.remote_url)
        assert tiers == (
            name == "memory",
            (str(own[0]),) if name == "disk" else (),
            {"remote": "redis://cache:6379", "private": "kvs+ipc:///tmp/kvs"}.get(name),
        )
        assert config.model_id == "kvstore-prove-run"
        assert (config.record_trace, config.peers, config.enable_pd, config.reshard_from) == (None, (), False, ())
        assert not any((config.internal_api_server_enabled, config.load_only_if_faster, config.verify_fraction))
        assert not config.max_local_gpu_size
        assert config.remote_password == ("s3cret" if name == "remote" else None) or name in {"memory", "disk"}
        assert config.remote_ttl_secs == (3600 if name == "remote" else None)


def test_situations_of_a_configuration(tmp_path: Path, run: Any) -> None:
    every = settings_of(tmp_path)
    assert every.situations == tuple(Situation)
    left_out = list(every.left_out())
    assert [line.split()[0] for line in left_out] == ["hand-overs", "peers", "the"]
    memory = settings_of(tmp_path, "max_local_cpu_size: 1\n")
    assert memory.situations[-1] is Situation.MEMORY
    assert not list(memory.left_out())
    pack = settings_of(tmp_path, f"local_cpu: false\nremote_url: pack://{tmp_path}/a.kvpack?x=y\n")
    assert pack.situations[-1] is Situation.COLD
    assert ["only read" in line for line in pack.left_out()] == [True]
    for name in ("disk", "dusk"):
        result = run("prove", "--config", memory.file, "--only", name, "--out", tmp_path / "proof", "--", "model")
        assert (result.exit_code, f"--only is {name}" in result.stderr.replace("'", "")) == (2, True)


def test_folders_are_beside_the_users_and_empty(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    made = scratch_folder(tmp_path / "disk", out, "0123456789")
    assert made.parent == tmp_path
    assert not list(made.iterdir())
    assert scratch_folder(tmp_path / "no" / "disk", out, "0123456789").parent == out


def test_secrets_of_flags_are_hidden() -> None:
    words = ["m", "--hf-token", "S", "--x-api-key=S", "--y.secret_access_key", "S", "--max-num-batched-tokens", "512"]
    words += ["--a", '{"aws_secret": "S", "in": [{"token": "S", "url": "s3://user:S@host"}], "max_tokens": 1}']
    words += ["--b=redis://user:S@host", "--lora-modules", "one", "two", "--c", "{S"]
    shown = shown_words(words)
    assert not [word for word in shown if "S" in word]
    assert [word for word in shown if word in words] == [
        *("m", "--hf-token", "--y.secret_access_key", "--max-num-batched-tokens", "512", "--a"),
        *("--lora-modules", "one", "two", "--c"),
    ]
    assert json.loads(shown[shown.index("--a") + 1])["max_tokens"] == 1


def test_the_command_of_each_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    settings = settings_of(tmp_path)
    plain = ProvingVllm(settings, tmp_path / "log", None, 60.0)
    words, own = plain.command(), plain.variables()
    assert "--kv-transfer-config" not in words
    assert words[-2:] == ["--shutdown-timeout", "30"]
    assert not plain.drains, "it has nothing to write"
    assert ("VLLM_API_KEY" in own, own["VLLM_LOGGING_LEVEL"]) == (False, "INFO")
    assert own["KVSTORE_CONFIG_FILE"] == str(settings.file)
    patient = settings_of(tmp_path, "", "--shutdown-timeout", "90")
    vllm = ProvingVllm(patient, tmp_path / "log", {"chunk_size": 64}, 60.0, {"MORE": "1"})
    words = vllm.command()
    assert (words.count("--shutdown-timeout"), vllm.drains) == (1, True)
    assert vllm.stop_timeout_s > 90
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"kvstore.chunk_size": 64}
    assert vllm.variables()["MORE"] == "1"
    vllm.log.write_text("dtype=x\n config: dtype=torch.bfloat16, quantization=None, kv_cache_dtype='fp8', a=1\n")
    assert vllm.types == {"dtype": "bfloat16", "quantization": "None", "kv_cache_dtype": "fp8"}


def test_prompts(tmp_path: Path) -> None:
    made = made_up_prompts(None)
    assert [len(prompt) for prompt in made.contents] == list(LENGTHS)
    assert all(length % 16 for length in LENGTHS)
    assert made == made_up_prompts(100_000), "the same in every proof"
    cut = made_up_prompts(512)
    assert max(map(len, cut.contents)) < 512 - OUTPUT_TOKENS
    file = tmp_path / "p.jsonl"
    file.write_text('"a secret"\n[1, 2, 3]\n')
    own = read_own(file, "model")
    assert own.contents == ("a secret", [1, 2, 3])
    assert "secret" not in json.dumps(own.described())
    assert own.described()["sha256"] != made.described()["sha256"]
    for text in ("", '"good"\n{"no": 1}\n'):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_own(file, "model")


def test_damage_is_to_files_below_the_folders(tmp_path: Path) -> None:
    (tmp_path / "own" / "deep").mkdir(parents=True)
    files = [tmp_path / "own" / "deep" / f"{number}.safetensors" for number in range(4)]
    others = [tmp_path / "0.safetensors", tmp_path / "own" / "note.json"]
    for file in (*files, *others):
        file.write_bytes(bytes(range(256)) * 16)
    assert damage([tmp_path / "own"]) == 3
    found = [file.read_bytes() for file in files]
    whole = others[0].read_bytes()
    assert [len(raw) for raw in found] == [2048, 4096, 4096, 2048]
    assert (found[0], found[2]) == (whole[:2048], whole)
    assert sum((one ^ other).bit_count() for one, other in zip(found[1], whole, strict=True)) == 1
    assert others[1].read_bytes() == whole
    assert not damage([tmp_path / "none"])


def test_servers_that_can_be_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert can_start("redis") == "redis-server is not on the PATH"
    assert can_start("object") == "no private server of the tier 'object' can be started"
    assert can_start("server") == can_start("members") == ""
