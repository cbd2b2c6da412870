"""The Helm chart: valid manifests, a configuration that kvstore takes, a pod that may do little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart import CHART, EXAMPLES, Manifest, helm, manifests, only, render
from support.drain_hooks import LAST_QUESTION_S, assert_drains

from kvstore.config import load_config
from kvstore.model.version import __version__
from kvstore.protocol.keyfiles import make_keys
from kvstore.tools.serve.options import server_options

KINDS = {"host-cache.yaml": "DaemonSet", "shared-pool.yaml": "StatefulSet", "tenants.yaml": "StatefulSet"}
VERSIONS = ("1.25", "1.37")  # the oldest that Chart.yaml allows, and the newest with a schema
CUSTOM = {"PodMonitor"}  # of the Prometheus operator, for which no schema is installed
GIB = 1 << 30
DIGEST = f"sha256:{'a' * 64}"

by_example = pytest.mark.parametrize("example", KINDS)


def pod(example: str | None = None, *arguments: str) -> Manifest:
    (found,) = (tree for tree in manifests(*arguments, example=example) if "template" in tree.get("spec", {}))
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


def configuration(*arguments: str, example: str | None = None) -> dict[str, Any]:
    keys: dict[str, Any] = yaml.safe_load(only("ConfigMap", *arguments, example=example)["data"]["kvstore.yaml"])
    return keys


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def test_the_chart_has_no_flaw_that_helm_sees() -> None:
    result = helm("lint", str(CHART), "--strict", "--set", "image.repository=kvstore")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


@by_example
@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_those_of_kubernetes(example: str, version: str) -> None:
    found = manifests("--set", "podMonitor.enabled=true", example=example)
    assert KINDS[example] in {tree["kind"] for tree in found}
    assert {"ConfigMap", "NetworkPolicy", "PodMonitor", "ServiceAccount"} <= {tree["kind"] for tree in found}
    schemas = pytest.importorskip("kubernetes_validate", reason="needs the schemas in kubernetes-validate")
    for tree in found:
        if tree["kind"] not in CUSTOM:
            schemas.validate(tree, version, strict=True)


def test_a_wrong_manifest_would_be_noticed() -> None:
    tree = json.loads(json.dumps(only("DaemonSet", example="host-cache.yaml")))
    tree["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    schemas = pytest.importorskip("kubernetes_validate", reason="needs the schemas in kubernetes-validate")
    with pytest.raises(schemas.ValidationError, match="livenessProb"):
        schemas.validate(tree, VERSIONS[-1], strict=True)


@by_example
def test_names_and_labels_agree(example: str) -> None:
    found = manifests("--set", "podMonitor.enabled=true", example=example)
    (server,) = (tree for tree in found if "template" in tree.get("spec", {}))
    labels = server["spec"]["template"]["metadata"]["labels"].items()
    selectors = [server["spec"]["selector"]["matchLabels"]]
    selectors += [tree["spec"]["selector"] for tree in found if tree["kind"] == "Service"]
    selectors += [tree["spec"]["podSelector"]["matchLabels"] for tree in found if tree["kind"] == "NetworkPolicy"]
    budgets = {"PodDisruptionBudget", "PodMonitor"}
    selectors += [tree["spec"]["selector"]["matchLabels"] for tree in found if tree["kind"] in budgets]
    assert all(selector.items() <= labels for selector in selectors)
    assert len(selectors) == (5 if KINDS[example] == "StatefulSet" else 3)
    ports = {port["name"] for port in pod(example)["containers"][0]["ports"]}
    (policy,) = (tree for tree in found if tree["kind"] == "NetworkPolicy")
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == ports
    assert all(rule["from"] for rule in policy["spec"]["ingress"])  # an empty list would admit everybody


@by_example
def test_volumes_are_there_and_used(example: str) -> None:
    spec = pod(example)
    claims = [claim["metadata"] for tree in manifests(example=example) for claim in claims_of(tree)]
    volumes = {volume["name"] for volume in [*spec["volumes"], *claims]}
    mounts = [mount for container in containers(spec) for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == volumes
    assert {mount["mountPath"] for mount in mounts if mount["name"] == "config"} == {"/etc/kvstore/server"}
    (server,) = spec["containers"]
    assert server["args"] == ["serve", "--config", "/etc/kvstore/server/kvstore.yaml"]


def claims_of(tree: Manifest) -> list[Manifest]:
    return tree["spec"].get("volumeClaimTemplates", []) if tree["kind"] == "StatefulSet" else []


def rooted(text: str, root: Path) -> str:
    """Return a configuration in which the pod's folders lie below another root."""
    for folder in ("/run", "/mnt", "/etc", "/own"):
        text = text.replace(f"{folder}/", f"{root}{folder}/")
    return text


@by_example
def test_kvstore_takes_the_configuration(example: str, tmp_path: Path) -> None:
    keys = configuration(example=example)
    make_keys(tmp_path / "run/secrets/kvstore", "server")
    for name in ("admin", "vllm"):
        make_keys(tmp_path / "etc/kvstore/clients", name)
    file = tmp_path / "kvstore.yaml"
    file.write_text(rooted(yaml.safe_dump(keys), tmp_path))
    loaded = load_config(path=file, environ={})
    assert not loaded.warnings
    options = server_options(loaded.config)
    options.check()
    assert options.drain_s == keys["server_drain_secs"]
    assert (options.tcp is not None) is (KINDS[example] == "StatefulSet")
    assert (options.disk is not None) is ("local_disk" in keys)
    assert set(options.quotas) == ({"team-a", "team-b", "*"} if example == "tenants.yaml" else set())
    assert options.operators == ({"admin"} if example == "tenants.yaml" else set())


@by_example
def test_the_memory_is_that_of_the_pool_and_more(example: str) -> None:
    resources = pod(example)["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    size = resources["limits"]["memory"]
    assert size.endswith("Mi")
    pool_bytes = configuration(example=example)["max_local_cpu_size"] * GIB
    assert int(size.removesuffix("Mi")) * (1 << 20) == pytest.approx(1.02 * pool_bytes + GIB, abs=1 << 20)


@pytest.mark.parametrize(("drain", "grace"), [("0", 15), ("30", 45), ("0.5", 16)], ids=["none", "some", "part"])
def test_the_pod_may_write_its_chunks_before_it_is_killed(drain: str, grace: int) -> None:
    assert pod(None, "--set-json", f"drainSeconds={drain}")["terminationGracePeriodSeconds"] == grace


@by_example
def test_the_pod_may_do_little(example: str) -> None:
    spec = pod(example)
    assert spec["automountServiceAccountToken"] is False
    assert only("ServiceAccount", example=example)["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["runAsGroup"] == 10001
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys()
    for container in containers(spec):
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
        assert context["capabilities"]["drop"] == ["ALL"]
        added = context["capabilities"].get("add", [])
        assert added == (["CHOWN", "FOWNER"] if container["name"] == "own-folders" else [])
        assert ("runAsUser" in context) is (container["name"] == "own-folders")


def test_keys_are_files_of_root_for_the_group() -> None:
    """Kubernetes renews them in place, so that a new token counts with the next reload."""
    spec = pod("tenants.yaml")
    assert "initContainers" not in spec
    (keys,) = (volume["projected"] for volume in spec["volumes"] if volume["name"] == "keys")
    assert keys["defaultMode"] == 0o440
    assert [source["secret"]["items"][0]["path"] for source in keys["sources"]] == ["server.key", "token"]
    (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "keys")
    told = configuration(example="tenants.yaml")
    assert told["server_key_file"] == f"{mount['mountPath']}/server.key"
    assert told["server_http_token_file"] == f"{mount['mountPath']}/token"


def test_probes_ask_the_port_of_the_pages() -> None:
    (server,) = pod("host-cache.yaml")["containers"]
    paths = {name: server[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in paths.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {probe["port"] for probe in paths.values()} == {"http"}
    keys = configuration(example="host-cache.yaml")
    assert {"name": "http", "containerPort": keys["server_http_port"]} in server["ports"]
    assert keys["server_http_host"] == "0.0.0.0"  # the node asks the pod's address


def test_a_change_replaces_pods_unless_told_otherwise() -> None:
    def annotations(*arguments: str) -> Manifest:
        found: Manifest = only("DaemonSet", *arguments)["spec"]["template"]["metadata"]["annotations"]
        return found

    before, after = annotations(), annotations("--set", "quotas.a=3")
    assert before["checksum/config"] != after["checksum/config"]
    assert "checksum/config" not in annotations("--set", "restartOnChange=false")


def test_a_new_pod_takes_over_from_the_old_one_of_its_host() -> None:
    for kind, takes_over in (("DaemonSet", True), ("StatefulSet", False)):
        example = "host-cache.yaml" if takes_over else "shared-pool.yaml"
        server = only(kind, "--set", "takeOver=true", example=example)["spec"]
        (container,) = server["template"]["spec"]["containers"]
        assert ("--take-over" in container["args"]) == ("--wait-at-end" in container["args"]) == takes_over
        assert server.get("updateStrategy", {}).get("rollingUpdate", {}).get("maxSurge") == (1 if takes_over else None)
    assert (
        "--take-over"
        not in only("DaemonSet", example="host-cache.yaml")["spec"]["template"]["spec"]["containers"][0]["args"]
    )


@pytest.mark.parametrize(("tag", "end"), [("", f":{__version__}"), ("v1", ":v1"), (DIGEST, f"@{DIGEST}")])
def test_the_image_has_a_tag_or_a_digest(tag: str, end: str) -> None:
    (server,) = pod(None, "--set", f"image.tag={tag}")["containers"]
    assert server["image"] == f"kvstore{end}"


def test_other_keys_of_the_configuration() -> None:
    assert configuration("--set", "config.cache_policy=LRU")["cache_policy"] == "LRU"
    assert configuration("--set", "logLevel=DEBUG")["server_log_level"] == "DEBUG"
    assert configuration("--set-json", "memoryGib=0.5")["max_local_cpu_size"] == 0.5


SHARED = ("--set", "kind=StatefulSet", "--set", "tcp.serverKeySecret=a", "--set", "tcp.clientsSecret=b")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "kind=Deployment"], "kind"),
        (["--set", "memoryGb=20"], "memoryGb"),
        (["--set", "memoryGib=0"], "memoryGib"),
        (["--set-string", "memoryGib=20GiB"], "memoryGib"),
        (["--set", "user=0"], "user"),
        (["--set", "http.port=80"], "port"),
        (["--set", "socketFolder=run"], "socketFolder"),
        (["--set", f"socketFolder=/{'a' * 99}"], "socketFolder"),
        (["--set", "quotas.a=-1"], "quotas"),
        (["--set", "quotas.a=much"], "quotas"),
        (["--set", "kind=StatefulSet"], "tcp"),
        (["--set", "kind=StatefulSet", "--set", "tcp.serverKeySecret=a"], "tcp"),
        ([*SHARED, "--set", "tcp.clientsConfigMap=c"], "tcp"),
        (["--set", "networkPolicy.monitoring[0]=x"], "monitoring"),
        (["--set", "config.server_listen=kvs://0.0.0.0:1"], "config.server_listen: the chart sets this key"),
        (["--set", "image.repository="], "image.repository: name the image"),
    ],
)
def test_wrong_values_are_refused(arguments: list[str], complaint: str) -> None:
    result = render(*arguments)
    assert result.returncode != 0
    assert complaint in result.stderr


def test_the_values_that_are_varied_are_right() -> None:
    assert render(*SHARED).returncode == 0


def test_vllm_is_pointed_at_the_cache_of_its_host() -> None:
    spec = yaml.safe_load((EXAMPLES / "vllm-values.yaml").read_text())["servingEngineSpec"]
    (model,) = spec["modelSpec"]
    server = pod("host-cache.yaml")
    for key in ("runAsUser", "runAsGroup"):
        assert spec["securityContext"][key] == server["securityContext"][key]
    (volume,), (mount,) = model["extraVolumes"], model["extraVolumeMounts"]
    (sockets,) = (each for each in server["volumes"] if each["name"] == "sockets")
    assert volume["hostPath"] == sockets["hostPath"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], volume["hostPath"]["path"])
    variables = {each["name"]: each["value"] for each in model["env"]}
    url = variables["KVSTORE_REMOTE_URL"]
    assert url == configuration(example="host-cache.yaml")["server_listen"] == f"kvs+ipc://{mount['mountPath']}"
    assert not load_config(environ=variables).warnings
    arguments = model["vllmConfig"]["extraArgs"]
    flag = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert (flag["kv_connector"], flag["kv_load_failure_policy"]) == ("KVStoreConnector", "recompute")


def test_vllm_drains_before_its_pod_ends() -> None:
    """The grace period holds the hook, with its last question, and then vLLM's end."""
    (model,) = yaml.safe_load((EXAMPLES / "vllm-values.yaml").read_text())["servingEngineSpec"]["modelSpec"]
    patch = yaml.safe_load((EXAMPLES / "vllm-drain.yaml").read_text())
    spec = patch["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    wait_s = assert_drains(container["lifecycle"]["preStop"]["exec"]["command"])
    arguments = model["vllmConfig"]["extraArgs"]
    end_s = int(arguments[arguments.index("--shutdown-timeout") + 1])
    assert spec["terminationGracePeriodSeconds"] > wait_s + LAST_QUESTION_S + end_s
    labels = {"app": "vllm"}
    patch |= {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}}
    patch["spec"]["selector"] = {"matchLabels": labels}
    patch["spec"]["template"]["metadata"] = {"labels": labels}
    schemas = pytest.importorskip("kubernetes_validate", reason="needs the schemas in kubernetes-validate")
    for version in VERSIONS:
        schemas.validate(patch, version, strict=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_the_folders_get_their_user(tmp_path: Path) -> None:
    """The init container's own command, with its two capabilities only, on new folders and on those of before."""
    (container,) = pod("host-cache.yaml")["initContainers"]
    command = [rooted(word, tmp_path) for word in container["command"]]
    names = [f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"]]
    allowed = ",".join(["-all", *names])
    folders = [tmp_path / "own/sockets", tmp_path / "own/disk"]
    for folder in folders:
        folder.mkdir(parents=True, mode=0o755)
    for _ in range(2):
        with_few = ["setpriv", f"--bounding-set={allowed}", f"--inh-caps={allowed}", *command]
        subprocess.run(with_few, check=True)
        for status in (folder.stat() for folder in folders):
            assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (10001, 10001, 0o700)
