"""``kvstore config show`` and ``from-lmcache``."""

from __future__ import annotations

import contextlib
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.lmcache_file import EVERYTHING

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.tools.configs import from_lmcache

EXAMPLES = Path(__file__).resolve().parents[2] / "config" / "examples"


def lmcache_file(folder: Path, text: str) -> Path:
    file = folder / "lmcache.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_key_that_people_use(tmp_path: Path) -> None:
    """The result means the same, needs no warning, and names what is lost."""
    source = lmcache_file(tmp_path, EVERYTHING)
    converted = from_lmcache(source)
    result = tmp_path / "kvstore.yaml"
    result.write_text(converted.text, encoding="utf-8")
    before, after = load_config(path=source, environ={}), load_config(path=result, environ={})
    assert after.warnings == ()
    kept = {"cache_policy": "S3FIFO", "remote_serde": "none"}
    assert after.config.model_dump() == before.config.model_copy(update=kept).model_dump()
    assert after.config.disk_io_threads == 8
    lost = "\n".join([*converted.without_equivalent, *converted.recipes])
    keys = (
        "pin_timeout_sec numa_mode local_cpu_use_hugepages pd_proxy_host enable_p2p "
        "enable_controller save_only_first_rank ping_timeout FIFO pre_caching_hash_algorithm reserve_local_cpu_size"
    )
    for key in keys.split():
        assert key in lost, key
    told = (*converted.without_equivalent, *converted.recipes)
    assert all(line in converted.text for line in told), "they stand in the file as well"
    assert "enable_blending" not in lost, "switched off: nothing is lost"


def test_our_example(tmp_path: Path) -> None:
    converted = from_lmcache(EXAMPLES / "from-lmcache.yaml")
    assert yaml.safe_load(converted.text)["local_disk"] == "/var/tmp/kvstore/".rstrip("/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("discard_partial_chunks: true\n", {"save_unfull_chunk": False}),
        (
            "remote_url: lm://localhost:65432\nremote_serde: cachegen\n",
            {"remote_url": "kvs://localhost:65432", "remote_serde": "none"},
        ),
        ("remote_url: mooncakestore://h:1\n", {"remote_url": "mooncakestore://h:1"}),
        ("remote_url: infinistore://h:1\n", None),
        ("cache_policy: MRU\n", {"cache_policy": "ADAPTIVE"}),
        (
            "local_disk: [/a, /b]\nmax_local_disk_size: 10.0\n",
            {"local_disk": ["/a", "/b"], "max_local_disk_size": 10.0},
        ),
        ("max_local_disk_size: 10.0\n", None),
        ("", None),
    ],
)
def test_what_is_renamed_or_left_out(tmp_path: Path, text: str, expected: object) -> None:
    converted = from_lmcache(lmcache_file(tmp_path, text))
    assert yaml.safe_load(converted.text) == expected


def test_a_key_of_nobodys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chunk_size"):
        from_lmcache(lmcache_file(tmp_path, "chunk_sise: 256\n"))


def test_from_lmcache_command(tmp_path: Path, run: Any, run_json: Any) -> None:
    source, target = lmcache_file(tmp_path, EVERYTHING), tmp_path / "out.yaml"
    result = run("config", "from-lmcache", source, "-o", target)
    assert result.exit_code == 0
    assert "no equivalent: " in result.stderr
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert run("config", "check", target).exit_code == 0
    assert run("config", "from-lmcache", source, "-o", target).exit_code == 2
    assert run("config", "from-lmcache", source, "-o", target, "--force").exit_code == 0
    code, tree = run_json("config", "from-lmcache", source)
    assert code == 0
    assert tree["yaml"] == target.read_text()
    assert run("config", "from-lmcache", tmp_path / "none.yaml").exit_code == 2


LISTENS = {"server_key_file": "keys/server.key", "server_clients": "keys/clients"}
CONNECTS = {"remote_key_file": "keys/engine.key", "remote_server_key_file": "keys/server.pub"}


@pytest.mark.parametrize(
    ("text", "values", "recipes"),
    [
        (
            "enable_p2p: true\np2p_host: localhost\np2p_init_ports: 8200\np2p_lookup_ports: 8201\n",
            {"enable_pd": True, "pd_peer_host": "localhost", "pd_peer_init_port": 8200},
            ["list the first worker of each in peers"],
        ),
        (
            "enable_p2p: true\np2p_host: 10.0.0.5\np2p_init_ports: 8200,8201\n",
            {"enable_pd": True, "pd_peer_host": "10.0.0.5", "pd_peer_init_port": [8200, 8201], **LISTENS, **CONNECTS},
            ["peers", "kvstore keygen"],
        ),
        ("enable_p2p: true\nremote_url: redis://h:1\n", {"remote_url": "redis://h:1"}, ["through remote_url"]),
        (
            "enable_pd: true\npd_role: receiver\npd_peer_host: 10.0.0.7\npd_peer_init_port: [7300]\n",
            {
                "enable_pd": True,
                "pd_role": "receiver",
                "pd_peer_host": "10.0.0.7",
                "pd_peer_init_port": [7300],
                **LISTENS,
            },
            ["--role consumer", "kvstore proxy", "kvstore keygen"],
        ),
        (
            "enable_pd: true\npd_role: sender\npd_proxy_host: 10.0.0.9\npd_proxy_port: 7500\n",
            {"enable_pd": True, "pd_role": "sender"},
            ["list the receivers", "--role producer", "kvstore proxy .* in place of the one at 10.0.0.9"],
        ),
        (
            "enable_pd: true\npd_role: sender\npd_peer_host: 10.0.0.7\npd_peer_init_port: 7300\n",
            {
                "enable_pd": True,
                "pd_role": "sender",
                "pd_peer_host": "10.0.0.7",
                "pd_peer_init_port": 7300,
                "pd_allowed_hosts": ["10.0.0.7"],
                **CONNECTS,
            },
            ["--role producer", "kvstore proxy", "kvstore keygen"],
        ),
        (
            "enable_nixl: true\nnixl_role: receiver\nnixl_peer_host: localhost\nnixl_peer_port: 55555\n",
            {"enable_pd": True, "pd_role": "receiver", "pd_peer_host": "localhost", "pd_peer_init_port": 55555},
            ["--role consumer", "kvstore proxy"],
        ),
        (
            "remote_url: lm://10.0.0.3:65432\n",
            {"remote_url": "kvs://10.0.0.3:65432", **CONNECTS},
            ["kvstore serve .* server_listen: kvs://10.0.0.3:65432", "kvstore keygen"],
        ),
        (
            "remote_url: s3://me:secret@bucket.s3.eu-central-1.amazonaws.com\nlocal_cpu: true\n",
            {"remote_url": "s3://bucket/kv", "local_cpu": True},
            ["check the bucket.*region.*credentials"],
        ),
        ("remote_url: fs://h/x\nlocal_cpu: true\n", {"local_cpu": True}, ["file:///path here"]),
        ("remote_url: lm://no-port\nlocal_cpu: true\n", {"local_cpu": True}, ["there is no lm:// here"]),
        (
            "enable_pd: true\npd_role: receiver\nremote_url: lm://h:1\n",
            {"enable_pd": True, "pd_role": "receiver", "pd_peer_init_port": 7300},
            ["--role consumer", "kvstore proxy", "left out: this engine's own server"],
        ),
    ],
)
def test_what_concerns_several_engines(
    tmp_path: Path, text: str, values: dict[str, object], recipes: list[str]
) -> None:
    """Each key is converted, or a recipe says what to do, and the result loads without a warning."""
    converted = from_lmcache(lmcache_file(tmp_path, text))
    assert yaml.safe_load(converted.text) == values
    assert len(converted.recipes) == len(recipes)
    for line, pattern in zip(converted.recipes, recipes, strict=True):
        assert re.search(pattern, line), line
        assert "secret" not in line
    result = tmp_path / "kvstore.yaml"
    result.write_text(converted.text, encoding="utf-8")
    assert load_config(path=result, environ={}).warnings == ()
    assert not converted.keeps_nothing


@pytest.mark.parametrize(
    "key", ["pd_role", "pd_peer_host", "pd_proxy_host", "remote_url", "p2p_host", "p2p_init_ports"]
)
@pytest.mark.parametrize("value", ['"a\\nremote_password: x"', "[1, a]", "{a: 1}", "7", '"[x"', '"lm://[x"', "1,b"])
def test_whatever_stands_there(tmp_path: Path, key: str, value: str) -> None:
    """The result is a configuration without it, or an error of the configuration; no text of the file becomes a key."""
    with contextlib.suppress(ConfigError):
        text = from_lmcache(lmcache_file(tmp_path, f"enable_pd: true\nenable_p2p: true\n{key}: {value}\n")).text
        assert "remote_password" not in (yaml.safe_load(text) or {})


def test_a_file_with_which_nothing_would_be_cached(tmp_path: Path, run: Any, run_json: Any) -> None:
    source = lmcache_file(tmp_path, "local_cpu: false\nremote_url: fs://h:1/bucket\n")
    result = run("config", "from-lmcache", source)
    assert result.exit_code == 1
    assert "error: nothing would be cached" in result.stderr.splitlines()[-1]
    code, tree = run_json("config", "from-lmcache", source)
    assert (code, tree["keeps_nothing"], len(tree["recipes"])) == (1, True, 1)


def test_check_shows_what_differs(tmp_path: Path, run: Any) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("chunk_size: 256\nmax_local_cpu_size: 2.5\nremote_url: redis://:secret@h\n", encoding="utf-8")
    short, whole = (run("config", "check", file, *flags).stdout.splitlines() for flags in ([], ["--all"]))
    assert short[:-1] == ["max_local_cpu_size: 2.5  # line 2", 'remote_url: "redis://***@h"  # line 3']
    assert short[-1] == f"{len(whole) - 2} settings have their defaults: --all shows them"
    assert "chunk_size: 256  # line 1" in whole


def test_show_tells_where_values_come_from(
    tmp_path: Path, run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("chunk_size: 512\nremote_url: redis://user:secret@cache\n", encoding="utf-8")
    monkeypatch.setenv("KVSTORE_CONFIG_FILE", str(file))
    monkeypatch.setenv("KVSTORE_MAX_LOCAL_CPU_SIZE", "2.5")
    code, tree = run_json("config", "show")
    assert code == 0
    assert tree["config"]["chunk_size"] == {"value": 512, "origin": f"file {file}, line 1"}
    assert tree["config"]["max_local_cpu_size"]["origin"] == "environment KVSTORE_MAX_LOCAL_CPU_SIZE"
    assert tree["config"]["local_disk"] == {"value": None, "origin": "default"}
    shown = run("config", "show", "--changed")
    assert shown.stdout.splitlines() == [
        f"chunk_size: 512  # file {file}, line 1",
        "max_local_cpu_size: 2.5  # environment KVSTORE_MAX_LOCAL_CPU_SIZE",
        f'remote_url: "redis://***@cache"  # file {file}, line 2',
    ]
    assert "secret" not in run("config", "check", file).stdout
    monkeypatch.setenv("KVSTORE_CHUNK_SIZE", "many")
    assert run("config", "show").exit_code == 2
