"""The compose file: as the Compose Specification has it, with a server and engines that find each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.drain_hooks import assert_drains

from kvstore.config import load_config
from kvstore.tools.serve.options import server_options

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "compose"
GIB = 1 << 30


def compose() -> dict[str, Any]:
    """Return the file with the default of each variable."""
    text = (FOLDER / "compose.yaml").read_text()
    tree: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return tree


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"][name]
    return found


def mounts(name: str) -> dict[str, str]:
    """Return the volumes and files of a service by their path in it."""
    return {parts[1]: parts[0] for parts in (text.split(":") for text in service(name)["volumes"])}


def test_it_is_of_the_compose_specification() -> None:
    specification = pytest.importorskip("compose_spec", reason="needs compose-spec")
    models = pytest.importorskip("compose_spec.models", reason="needs compose-spec")
    tree = compose()
    typed = models.ComposeSpecification.model_validate(tree)
    hooks = {name: each.pop("pre_stop") for name, each in tree["services"].items() if "pre_stop" in each}
    assert hooks.keys() == {"vllm-a", "vllm-b"}  # newer than the strict half of that package
    for name, given in hooks.items():
        assert [hook.command for hook in typed.services[name].pre_stop] == [hook["command"] for hook in given]
    specification.PyCompose.from_yaml(yaml.safe_dump(tree)).validate()
    wrong = tree
    wrong["services"]["cache"]["mem_limits"] = "1g"
    with pytest.raises(ValueError, match="mem_limits"):
        specification.PyCompose.from_yaml(yaml.safe_dump(wrong))


def test_volumes_and_services_are_there() -> None:
    tree = compose()
    named = {source for name in tree["services"] if "volumes" in service(name) for source in mounts(name).values()}
    files = {source for source in named if source.startswith(".")}
    assert all((FOLDER / source).is_file() for source in files)
    assert named - files == tree["volumes"].keys()
    for each in tree["services"].values():
        assert each.get("depends_on", {}).keys() <= tree["services"].keys()
        assert all(port.startswith("127.0.0.1:") for port in each.get("ports", []))


def test_all_of_kvstore_runs_as_the_user_of_the_folders() -> None:
    (folder,) = {source for source, path in ((mounts(n)["/run/kvstore"], n) for n in ("cache", "vllm-a", "vllm-b"))}
    assert mounts("prepare")["/own/sockets"] == folder
    assert mounts("prepare").keys() <= set(service("prepare")["entrypoint"])
    options = {
        word.partition("=")[0]: word.partition("=")[2] for word in service("prepare")["entrypoint"] if "=" in word
    }
    assert options["--mode"] == "0700"
    for name in ("cache", "vllm-a", "vllm-b"):
        assert service(name)["user"] == f"{options['--owner']}:{options['--group']}"
        assert service(name)["cap_drop"] == ["ALL"]


def test_kvstore_takes_the_configuration_of_the_cache() -> None:
    keys = yaml.safe_load((FOLDER / "cache.yaml").read_text())
    loaded = load_config(path=FOLDER / "cache.yaml", environ={})
    assert not loaded.warnings
    options = server_options(loaded.config)
    options.check()
    cache = service("cache")
    assert mounts("cache")["/etc/kvstore/cache.yaml"] == "./cache.yaml"
    assert cache["command"] == ["serve", "--config", "/etc/kvstore/cache.yaml"]
    assert str(options.folder) in mounts("cache")
    assert options.disk is not None
    assert str(options.disk.folder.parent) in mounts("cache")
    assert int(cache["mem_limit"].removesuffix("g")) * GIB >= options.pool_bytes + 2 * GIB
    assert int(cache["stop_grace_period"].removesuffix("s")) > options.drain_s
    assert (keys["server_http_host"], keys["server_http_port"]) == ("0.0.0.0", 9464)  # as Prometheus and probes ask


@pytest.mark.parametrize("name", ["vllm-a", "vllm-b"])
def test_vllm_uses_the_cache(name: str) -> None:
    engine = service(name)
    variables = {key: value for key, value in engine["environment"].items() if key.startswith("KVSTORE_")}
    loaded = load_config(environ=variables)
    assert not loaded.warnings
    assert loaded.config.remote_url == yaml.safe_load((FOLDER / "cache.yaml").read_text())["server_listen"]
    assert engine["entrypoint"] == ["vllm", "serve"]
    flag = json.loads(engine["command"][engine["command"].index("--kv-transfer-config") + 1])
    assert (flag["kv_connector"], flag["kv_load_failure_policy"]) == ("KVStoreConnector", "recompute")
    drain_s = int(engine["command"][engine["command"].index("--shutdown-timeout") + 1])
    assert int(engine["stop_grace_period"].removesuffix("s")) > drain_s
    (hook,) = engine["pre_stop"]
    assert_drains(hook["command"])


def test_prometheus_asks_all() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for each in job["static_configs"] for target in each["targets"]}
    assert targets == {"cache:9464", "vllm-a:8000", "vllm-b:8000"}
    assert {target.partition(":")[0] for target in targets} <= compose()["services"].keys()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
def test_prometheus_takes_its_configuration() -> None:
    command = ["promtool", "check", "config", str(FOLDER / "prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
