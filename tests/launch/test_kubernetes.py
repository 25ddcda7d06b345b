"""Objects of `baton emit kubernetes`: they validate, and each kind of mistake in them is detected."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from launch.cli import baton
from launch.kubernetes.command import to_yaml
from launch.kubernetes.objects import AFTER_DRAIN_S
from tests.docs.generate import metrics
from tests.support import kubernetes
from tests.support.kubernetes import PodTemplate, Table, objects_of, pod_templates

TOPOLOGY = """
model = "/models/m"
[options]
cluster_token_file = "/etc/baton/secrets/token"
drain_timeout_s = 60
[[nodes]]
name = "front"
address = "10.0.0.1"
[[nodes]]
name = "b"
address = "10.0.0.2"
gpus = 2
cores = 8
[[nodes]]
name = "c"
address = "10.0.0.3"
gpus = 2
cores = 8
[coordinator]
node = "front"
api_key_file = "/etc/baton/keys/api-keys"
[batches]
data_dir = "/var/lib/baton"
[[prefill]]
nodes = ["b", "c"]
tensor_parallel = 2
base_port = 9000
[[decode]]
node = "b"
base_port = 9100
[[decode]]
node = "c"
base_port = 9200
"""
SUM = hashlib.sha256(b"x").hexdigest()
SUMS = f"{SUM}  m/config.json\n{SUM} *m/model.safetensors\n"


@pytest.fixture
def emit(tmp_path: Path) -> Callable[..., list[Table]]:
    """Emits a topology; returns its objects."""

    def run(*options: str, topology: str = TOPOLOGY, sums: str = SUMS) -> list[Table]:
        done = emitted(tmp_path, *options, topology=topology, sums=sums)
        assert done.exit_code == 0, done.output or done.exception
        return objects_of((tmp_path / "out/objects.yaml").read_text())

    return run


def emitted(where: Path, *options: str, topology: str = TOPOLOGY, sums: str = SUMS) -> Result:
    (where / "t.toml").write_text(topology)
    (where / "sums").write_text(sums)
    given = ["--models-claim", "models", "--checksums", str(where / "sums"), "--out", str(where / "out"), *options]
    return CliRunner().invoke(baton, ["emit", "kubernetes", str(where / "t.toml"), *given])


def of_kind(objects: list[Table], kind: str) -> list[Table]:
    return [each for each in objects if each["kind"] == kind]


def template(objects: list[Table], part: str) -> PodTemplate:
    return next(each for each in pod_templates(objects) if part in each.where)


SCALED = ("--prefill-max", "4", "--decode-max", "8")
FORMS: dict[str, tuple[str, ...]] = {
    "disaggregatedset": (),
    "disaggregatedset scaled": SCALED,
    "leaderworkerset": ("--sets", "leaderworkerset"),
    "leaderworkerset scaled": ("--sets", "leaderworkerset", *SCALED),
    "external scaler": (*SCALED, "--scaler", "baton-autoscale:8105"),
    "one role scaled": ("--decode-max", "8", "--no-pod-monitor"),
}
TOPOLOGIES = {
    "keys and batches": TOPOLOGY,
    "tls": TOPOLOGY.replace(
        "[options]", '[options]\ncluster_tls_dir = "/etc/baton/tls"\ntls_cert_file = "/etc/baton/front/tls.crt"'
    ).replace("api_key_file", 'tls_key_file = "/etc/baton/front/tls.key"\napi_key_file'),
    "open, stored responses": re.sub(r"api_key_file.*|\[batches\]\ndata_dir.*", "", TOPOLOGY).replace(
        "[coordinator]", '[coordinator]\nstore = true\ndata_dir = "/data"'
    ),
    "built-in model on CPU": TOPOLOGY.replace("/models/m", "builtin").replace("gpus = 2", ""),
}


@pytest.mark.parametrize("which", TOPOLOGIES)
@pytest.mark.parametrize("form", FORMS)
def test_objects_validate(form: str, which: str, emit: Callable[..., list[Table]]) -> None:
    objects = emit(*FORMS[form], topology=TOPOLOGIES[which])
    evaluated: list[str] = []
    assert kubernetes.all_errors(objects) == []
    kubernetes.rule_errors(objects, evaluated)
    assert len(evaluated) == len(of_kind(objects, "DisaggregatedSet")) + len(of_kind(objects, "ScaledObject"))
    assert len(pod_templates(objects)) == 4  # coordinator, leader and followers of prefill, decode


@pytest.mark.parametrize(("drain_s", "period_s"), [(60, 60 + AFTER_DRAIN_S), (7200, 1800)])
def test_a_pool_shrinks_by_a_worker_in_the_time_of_a_drain_or_half_an_hour(
    drain_s: int, period_s: int, emit: Callable[..., list[Table]]
) -> None:
    """A HorizontalPodAutoscaler accepts no longer period."""
    topology = TOPOLOGY.replace("drain_timeout_s = 60", f"drain_timeout_s = {drain_s}")
    for scaled in of_kind(emit(*SCALED, topology=topology), "ScaledObject"):
        behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert [policy["periodSeconds"] for policy in behavior["scaleDown"]["policies"]] == [period_s]


def test_only_a_scaler_may_ask_for_no_workers(emit: Callable[..., list[Table]]) -> None:
    """What it asks for is bounded by its own options. A query about a pool without pods could not start any."""
    for form, least in (("disaggregatedset scaled", [1, 2]), ("external scaler", [0, 0])):
        specs = [each["spec"] for each in of_kind(emit(*FORMS[form]), "ScaledObject")]
        assert [spec["minReplicaCount"] for spec in specs] == least
        assert [spec.get("cooldownPeriod") for spec in specs] == ([None] * 2 if any(least) else [0, 0])


def test_a_worker_takes_its_domain_from_the_label_that_is_named(emit: Callable[..., list[Table]]) -> None:
    label = kubernetes.SLICE_LABEL
    for options, paths in ((), []), (("--domain-label", label), [f"metadata.labels['{label}']"] * 3):
        objects = emit(*options)
        assert kubernetes.all_errors(objects) == []
        containers = [each.spec["containers"][0] for each in pod_templates(objects)]
        named = [env for each in containers for env in each["env"] if env["name"] == "BATON_DOMAIN"]
        assert [env["valueFrom"]["fieldRef"]["fieldPath"] for env in named] == paths


def test_versions_of_kubernetes_with_schemas() -> None:
    assert tuple(f"1.{minor}" for minor in range(30, 38)) == kubernetes.VERSIONS


Plant = Callable[[list[Table]], None]


def plant(path: str, value: Any) -> Plant:
    """Returns what sets a field: `KIND.field.0.field`, of the object `KIND 1` of a kind; None removes it."""

    def change(objects: list[Table]) -> None:
        first, *keys = path.split(".")
        kind, _, number = first.partition(" ")
        node: Any = of_kind(objects, kind)[int(number or 0)]
        for key in keys[:-1]:
            node = node[int(key) if key.isdigit() else key]
        if value is None:
            del node[keys[-1]]
        else:
            node[keys[-1]] = value

    return change


def plant_word(old: str, new: str) -> Plant:
    """Returns what replaces a word in every command."""

    def change(objects: list[Table]) -> None:
        changed = 0
        for pod in pod_templates(objects):
            for container in pod.template["spec"]["containers"]:
                changed += container["command"].count(old)
                container["command"] = [new if word == old else word for word in container["command"]]
        assert changed

    return change


def plant_zero_replicas(objects: list[Table]) -> None:
    (whole,) = of_kind(objects, "DisaggregatedSet")
    for role, count in zip(whole["spec"]["roles"], (0, 1), strict=True):
        role.pop("scaling", None)
        role["spec"]["replicas"] = count


POD = "Deployment.spec.template.spec"
LEADER = "DisaggregatedSet.spec.roles.0.spec.leaderWorkerTemplate.leaderTemplate.spec"
MISTAKES: dict[str, tuple[Plant, str]] = {
    "misspelt field of a built-in object": (
        plant(f"{POD}.terminationGracePeriodSecond", 9),
        "'terminationGracePeriodSecond' was unexpected",
    ),
    "misspelt field of a custom object": (plant("DisaggregatedSet.spec.slice", 1), "'slice' was unexpected"),
    "misspelt field of a pod in a custom object": (plant(f"{LEADER}.restart", "Always"), "'restart' was unexpected"),
    "wrong type": (plant("Deployment.spec.replicas", "1"), '"1" is not of type'),
    "wrong value": (plant("PodDisruptionBudget.spec.maxUnavailable", []), "[] is not"),
    "unknown kind": (plant("PodMonitor.apiVersion", "monitoring.coreos.com/v9"), "no schema of monitoring"),
    "CEL rule of DisaggregatedSet": (plant_zero_replicas, "replicas must be zero"),
    "CEL rule of ScaledObject": (plant("ScaledObject.spec.minReplicaCount", 99), "minReplicaCount must be less"),
    "option that there is not": (plant_word("--drain-timeout-s", "--drain-time-s"), "No such option"),
    "value that an option refuses": (plant_word("60", "sixty"), "sixty"),
    "variable that nothing sets": (plant_word("$(POD_IP)", "$(POD_ADDRESS)"), "nothing sets POD_ADDRESS"),
    "label that pods do not have": (
        plant(f"{LEADER}.containers.0.env.1.valueFrom.fieldRef.fieldPath", "metadata.labels['a/b']"),
        "pods have no label a/b",
    ),
    "service links": (plant(f"{POD}.enableServiceLinks", None), "would be read as options"),
    "no probe": (plant(f"{POD}.containers.0.livenessProbe", None), "has only startupProbe, readinessProbe"),
    "port of a gRPC probe": (plant(f"{LEADER}.containers.0.livenessProbe.grpc.port", 9999), "no port 9999"),
    "port of an HTTP probe": (plant(f"{POD}.containers.0.livenessProbe.httpGet.port", "web"), "no port web"),
    "port that the command does not open": (plant_word("--health-port", "--step-tokens"), "port 9100"),
    "no health port": (plant(f"{LEADER}.containers.0.ports", None), "the leader has no port to probe"),
    "selector of a Service": (plant("Service.spec.selector", {"app": "x"}), "the selector matches no pod"),
    "port of a Service": (plant("Service.spec.ports.0.targetPort", "web"), "have no port web"),
    "Service that workers dial": (
        plant_word("baton-coordinator:8101", "coordinator:8101"),
        "no Service has coordinator",
    ),
    "Service of ready coordinators only": (
        plant("Service 1.spec.publishNotReadyAddresses", None),
        "until one is ready, which needs workers",
    ),
    "selector of a budget": (
        plant("PodDisruptionBudget.spec.selector.matchLabels", {"app": "x"}),
        "the selector matches no pod",
    ),
    "port of the PodMonitor": (plant("PodMonitor.spec.podMetricsEndpoints.0.port", "metrics"), "have no port metrics"),
    "spread over other pods": (
        plant(f"{POD}.topologySpreadConstraints.0.labelSelector.matchLabels", {"app": "x"}),
        "do not count the pod itself",
    ),
    "target of a ScaledObject": (plant("ScaledObject.spec.scaleTargetRef.name", "baton"), "there will be no"),
    "ConfigMap": (plant("ConfigMap.metadata.name", "other"), "no ConfigMap"),
    "volume": (plant(f"{POD}.volumes", []), "no volume"),
    "grace of the coordinator": (plant(f"{POD}.terminationGracePeriodSeconds", 75), "drains for 60.0 s within 75 s"),
    "grace of a worker": (plant(f"{LEADER}.terminationGracePeriodSeconds", 60), "drains for 60.0 s within 60 s"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_detected(mistake: str, emit: Callable[..., list[Table]]) -> None:
    objects = emit("--prefill-max", "4")
    change, message = MISTAKES[mistake]
    change(objects)
    errors = kubernetes.all_errors(objects)
    assert errors and any(message in error for error in errors), errors


def test_yaml_is_the_same_for_every_parser(tmp_path: Path) -> None:
    text = to_yaml([{"a": "1e3", "b": "yes", "c": "0x1f", "d": "12:30", "e": "null", "f": "~", "g": 3, "h": "-m"}])
    strings = re.findall(r'^[a-f]: (["\'].*["\'])$', text, re.MULTILINE)
    assert len(strings) == 6 and "g: 3" in text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kustomization_builds_to_the_same_objects(tmp_path: Path, emit: Callable[..., list[Table]]) -> None:
    objects = emit(*SCALED)
    done = subprocess.run(["kubectl", "kustomize", tmp_path / "out"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = {(each["kind"], each["metadata"]["name"]): each for each in objects_of(done.stdout)}
    assert built == {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_alike_workers_are_one_pool_and_others_are_not(emit: Callable[..., list[Table]]) -> None:
    (whole,) = of_kind(emit(), "DisaggregatedSet")
    roles = {role["name"]: role["spec"] for role in whole["spec"]["roles"]}
    assert {name: spec["replicas"] for name, spec in roles.items()} == {"prefill": 1, "decode": 2}
    assert {name: spec["leaderWorkerTemplate"]["size"] for name, spec in roles.items()} == {"prefill": 2, "decode": 1}
    other = TOPOLOGY.replace("base_port = 9200", "base_port = 9200\nmax_running = 8")
    objects = emit("--sets", "leaderworkerset", topology=other)
    names = [each["metadata"]["name"] for each in of_kind(objects, "LeaderWorkerSet")]
    assert names == ["baton-prefill", "baton-decode-0", "baton-decode-1"]


def test_a_group_of_pods_gets_its_ranks_from_the_set(emit: Callable[..., list[Table]]) -> None:
    objects = emit()
    leader, follower = (template(objects, f"prefill {key}Template") for key in ("leader", "worker"))

    def flag(pod: PodTemplate, name: str) -> str:
        command = pod.spec["containers"][0]["command"]
        return str(command[command.index(name) + 1])

    for pod in (leader, follower):
        assert flag(pod, "--nnodes") == "$(LWS_GROUP_SIZE)" and flag(pod, "--node-rank") == "$(LWS_WORKER_INDEX)"
        assert flag(pod, "--nproc-per-node") == "1" and flag(pod, "--master-port") == "9000"
    assert (flag(leader, "--master-addr"), flag(follower, "--master-addr")) == ("$(POD_IP)", "$(LWS_LEADER_ADDRESS)")
    assert "livenessProbe" in leader.spec["containers"][0] and "livenessProbe" not in follower.spec["containers"][0]


def test_every_gpu_of_a_worker_is_requested_and_none_is_named(emit: Callable[..., list[Table]]) -> None:
    two = TOPOLOGY.replace('node = "b"\n', 'node = "b"\ntensor_parallel = 2\n', 1)
    for options, name in ((), "nvidia.com/gpu"), (("--gpu-resource", "amd.com/gpu"), "amd.com/gpu"):
        objects = emit(*options, "--sets", "leaderworkerset", topology=two)
        limits = [pod.spec["containers"][0]["resources"].get("limits") for pod in pod_templates(objects)]
        assert limits == [None, {name: "1"}, {name: "1"}, {name: "2"}, {name: "1"}]
        assert "CUDA_VISIBLE_DEVICES" not in to_yaml(objects)


def test_workers_that_share_a_gpu_of_the_topology_get_one_each(emit: Callable[..., list[Table]]) -> None:
    shared = TOPOLOGY.replace("gpus = 2", "gpus = 1").replace('nodes = ["b", "c"]\ntensor_parallel = 2', 'node = "c"')
    objects = emit(topology=shared)
    text = to_yaml(objects)
    assert (
        "--gpu-share" not in text
        and "--edge-kind" not in text
        and text.count("nvidia.com/gpu") == 2
        and "\n        - 8\n" not in text
    )


def test_secrets_are_mounted_and_never_written(emit: Callable[..., list[Table]]) -> None:
    objects = emit(topology=TOPOLOGIES["tls"])
    assert not of_kind(objects, "Secret")
    keys = {
        pod.where.partition(" ")[0] + pod.where[-15:]: sorted(
            item["key"] for volume in pod.spec["volumes"] for item in volume.get("secret", {}).get("items", ())
        )
        for pod in pod_templates(objects)
    }
    front = ["api-keys", "ca.pem", "coordinator-key.pem", "coordinator.pem", "tls.crt", "tls.key", "token"]
    assert front in keys.values()
    assert ["ca.pem", "decode-key.pem", "decode.pem", "token"] in keys.values()
    for volume in (v for pod in pod_templates(objects) for v in pod.spec["volumes"] if "secret" in v):
        assert volume["secret"]["defaultMode"] & 0o007 == 0  # read_token refuses what all may read


def test_a_dollar_in_an_option_is_no_variable(emit: Callable[..., list[Table]]) -> None:
    objects = emit(topology='served_model_name = "$(POD_IP) $$x"\n' + TOPOLOGY)
    command = template(objects, "Deployment").spec["containers"][0]["command"]
    given = command[command.index("--served-model-name") + 1]
    assert kubernetes.expand(given, {"POD_IP": "10.0.0.1"}) == "$(POD_IP) $$x"


def test_checksums_of_models_here_are_computed_and_detect_damage(tmp_path: Path, emit: Callable[..., Any]) -> None:
    model = tmp_path / "models/m"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text(name)
    objects = emit("--checksums", "", topology=TOPOLOGY.replace("/models/m", str(model)))
    (config_map,) = of_kind(objects, "ConfigMap")
    verify = template(objects, "decode").spec["initContainers"][0]
    assert verify["workingDir"] == str(tmp_path / "models")
    (tmp_path / "SHA256SUMS").write_text(config_map["data"]["SHA256SUMS"])
    command = [str(tmp_path / "SHA256SUMS") if "/" in word else word for word in verify["command"]]

    def verified() -> int:
        return subprocess.run(command, cwd=verify["workingDir"], capture_output=True, timeout=20).returncode

    assert verified() == 0
    (model / "model.safetensors").write_text("model.safetensorS")
    assert verified() == 1
    (model / "model.safetensors").unlink()
    assert verified() == 1
    assert "safetensors" not in config_map["data"]["coordinator.SHA256SUMS"]


def test_other_checksums_are_a_rollout(emit: Callable[..., list[Table]]) -> None:
    first, second = emit(), emit(sums=SUMS.replace(SUM[:4], "0000"))
    assert template(first, "decode").template != template(second, "decode").template


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ((), ("cluster_token_file", "log_level = 'info' #"), "'cluster_token_file' is missing"),
        (("--name", "Baton"), ("", ""), "--name 'Baton' must be lower-case"),
        (("--name", "b" * 40), ("", ""), "is too long: at most"),
        (("--models-claim", ""), ("", ""), "--models-claim is missing: /models/m"),
        (("--models-claim", "My_Models"), ("", ""), "--models-claim 'My_Models' must be lower-case"),
        (("--secret", ""), ("", ""), "--secret '' must be lower-case"),
        (("--secret", "a..b"), ("", ""), "--secret 'a..b' must be lower-case"),
        (("--namespace", "n" * 64), ("", ""), f"--namespace '{'n' * 64}' must be lower-case"),
        (("--image", "a b"), ("", ""), "--image 'a b' must be an image reference"),
        (("--gpu-resource", "a b/gpu"), ("", ""), "--gpu-resource 'a b/gpu' must be a qualified name"),
        (("--domain-label", "a/"), ("", ""), "--domain-label 'a/' must be a qualified name"),
        (("--spread-over", "zone-"), ("", ""), "--spread-over 'zone-' must be a qualified name"),
        ((), ("/etc/baton/secrets/token", "secrets/token"), "'secrets/token' must be an absolute path"),
        *(
            ((), ("/etc/baton/secrets/token", path), f"coordinator: {path!r} must be the path of a file below a")
            for path in ("/etc/a token", "/etc/token/", "/token", "//token", "/./token", "/etc/..token", "/e:/token")
        ),
        ((), ("/etc/baton/secrets/token", "/etc/to\\nken"), r"coordinator: '/etc/to\nken' must be the path of a file"),
        ((), ("/models/m", "org/name"), "'org/name' must be an absolute path"),
        ((), ("/models/m", "/m"), "must be below one directory, not /"),
        ((), ("/etc/baton/keys/api-keys", "/etc/baton/keys/token"), "would both be the key token"),
        ((), ("/var/lib/baton", "/etc/baton/keys"), "/etc/baton/keys would be the mount of two volumes"),
        ((), ("tensor_parallel = 2", "tensor_parallel = 3"), "cannot be divided over 2 nodes"),
        ((), ("[[decode]]", "[[prefill]]"), "use --sets leaderworkerset"),
        ((), ("base_port = 9200", 'revision = "v1"'), "revision 'v1' in the topology"),
        (("--domain-label", "zone"), ("base_port = 9200", 'domain = "a"'), "domain 'a' in the topology and"),
        (("--scaler", "here"), ("", ""), "--scaler"),
        (("--prefill-max", "2147483648"), ("", ""), "--prefill-max must be at most 2147483647"),
        (("--decode-max", "2147483648"), ("", ""), "--decode-max must be at most 2147483647"),
        (("--start-timeout-s", "1e11"), ("", ""), "--start-timeout-s must be at most"),
        (("--prometheus", "http://a:9090\nx"), ("", ""), "--prometheus must be a URL"),
        (("--prometheus", "a:9090"), ("", ""), "--prometheus must be a URL"),
        (("--prometheus", "http://[x"), ("", ""), "--prometheus must be a URL"),
        (("--prometheus", "http://a:99999"), ("", ""), "--prometheus must be a URL"),
        (("--prometheus", "http:///a"), ("", ""), "--prometheus must be a URL"),
        (("--decode-max", "1"), ("", ""), "--decode-max 1 is less than the 2 decode workers"),
        (("--decode-max", "4"), ("base_port = 9200", "max_running = 8"), "only one pool of a role can be scaled"),
        (("--decode-max", "4"), ("[[decode]]", "[[prefill]]"), "--decode-max 4: the topology has no decode worker"),
        ((), ('model = "/models/m"', ""), "'model' is missing"),
    ],
)
def test_refused_topologies_write_nothing(
    options: tuple[str, ...], change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    topology = TOPOLOGY.replace(*change)
    if change[0] == "[[decode]]":
        topology = topology.replace("base_port = 9100", "").replace("base_port = 9200", "")
        topology = topology.replace("[coordinator]", '[coordinator]\nrunner = "pooling"')
        topology = topology.replace('nodes = ["b", "c"]\ntensor_parallel = 2', 'node = "b"')
    done = emitted(tmp_path, *options, topology=topology)
    assert message in str(done.exception or "") + done.output, done
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ("", "no weights of /models/m"),
        (f"{SUM}  m/config.json\n", "no weights of /models/m"),
        (f"{SUM}  /models/m/model.safetensors\n", "line 1 is not a sum"),
        (f"{SUM}  m/../../x\n", "line 1 is not a sum"),
        (SUMS + "abc m/x\n", "line 3 is not a sum"),
        (SUMS + f"{SUM}  m/a\\b\n", "a backslash or a new line"),
    ],
)
def test_checksums_that_would_verify_nothing_are_refused(sums: str, message: str, tmp_path: Path) -> None:
    assert message in str(emitted(tmp_path, sums=sums).exception)


def test_models_elsewhere_need_a_checksum_file(tmp_path: Path) -> None:
    assert "/models/m is not on this host: give --checksums" in str(emitted(tmp_path, "--checksums", "").exception)


def test_queries_use_metrics_and_labels_that_there_are(emit: Callable[..., list[Table]]) -> None:
    for scaled in of_kind(emit(*SCALED), "ScaledObject"):
        query = scaled["spec"]["triggers"][0]["metadata"]["query"]
        names = set(re.findall(r"\bbaton_\w+", query))
        assert names and {name.removesuffix("_count") for name in names} <= set(re.findall(r"`(\w+)`", metrics()))
        assert 'job="default/baton-coordinator"' in query
