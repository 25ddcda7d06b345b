"""What an API server and a kubelet would refuse of the objects that `baton emit kubernetes` writes, and what neither
would notice: a selector without pods, a probe of another port, a command that does not start.

Each check returns one line for each mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import cel
import click
import yaml
from jsonschema_rs import Draft202012Validator

from baton.core.errors import StartupError
from baton.runtime.config import BatchesConfig, CoordinatorConfig, WorkerConfig
from baton.runtime.options import config_command
from launch.agent import parse_job

Table = dict[str, Any]
SCHEMAS: Table = json.loads((Path(__file__).parents[1] / "data/kubernetes/schemas.json").read_text())
VERSIONS = tuple(name for name in SCHEMAS["kinds"] if name != "crds")
LWS_VARIABLES = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
LWS_LABELS = ("leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index")
REVISION_LABEL = "disaggregatedset.x-k8s.io/revision"
SLICE_LABEL = "disaggregatedset.x-k8s.io/slice"
CONFIGS = {
    "coordinator": CoordinatorConfig,
    "batches": BatchesConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
}
_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def objects_of(text: str) -> list[Table]:
    """The objects that YAML has, read by libyaml where PyYAML has it: the tests read thousands."""
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


@dataclass(frozen=True)
class PodTemplate:
    """A template in an object; `group` is the size of its LeaderWorkerSet, 0 in a Deployment, and `leads` whether it is
    of the group's leader."""

    where: str
    template: Table
    group: int = 0
    leads: bool = True

    @property
    def labels(self) -> Table:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Table:
        return dict(self.template["spec"])

    def containers(self) -> list[Table]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def pod_templates(objects: list[Table]) -> list[PodTemplate]:
    made: list[PodTemplate] = []
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Deployment":
            made.append(PodTemplate(name, each["spec"]["template"]))
        sets = {"": each["spec"]} if each["kind"] == "LeaderWorkerSet" else {}
        if each["kind"] == "DisaggregatedSet":
            sets = {f" role {role['name']}": role["spec"] for role in each["spec"]["roles"]}
        for role, spec in sets.items():
            group = spec["leaderWorkerTemplate"]
            for key in ("leaderTemplate", "workerTemplate"):
                if key in group:
                    leads = key == "leaderTemplate" or "leaderTemplate" not in group
                    made.append(PodTemplate(f"{name}{role} {key}", group[key], group["size"], leads))
    return made


def schema_of(each: Table, version: str) -> Table | None:
    name = f"{each['apiVersion']} {each['kind']}"
    schema: Table | None = SCHEMAS["kinds"][version].get(each["kind"]) or SCHEMAS["kinds"]["crds"].get(name)
    return schema


@cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({**json.loads(schema), "$defs": SCHEMAS["$defs"]})


def schema_errors(objects: list[Table], version: str) -> list[str]:
    made = []
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if (schema := schema_of(each, version)) is None:
            made.append(f"{name}: no schema of {each['apiVersion']}")
            continue
        errors = _validator(json.dumps(schema)).iter_errors(each)
        made += [f"{name}: {error.instance_path}: {error.message}" for error in errors]
    return made


def rule_errors(objects: list[Table], evaluated: list[str] | None = None) -> list[str]:
    """Evaluates the CEL rules of CRDs; each evaluated rule is appended to `evaluated`."""
    made = []

    def visit(schema: Table, value: Any, path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMAS["$defs"][schema["$ref"].rpartition("/")[2]]
        for rule in schema.get("x-kubernetes-validations", ()):
            if evaluated is not None:
                evaluated.append(rule["rule"])
            if not cel.evaluate(rule["rule"], {"self": value}):
                made.append(f"{path}: {rule['message']}")
        if isinstance(value, dict):
            for key, inner in value.items():
                below = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
                if isinstance(below, dict):
                    visit(below, inner, f"{path}.{key}")
        elif isinstance(value, list) and "items" in schema:
            for index, inner in enumerate(value):
                visit(schema["items"], inner, f"{path}[{index}]")

    for each in objects:
        if (schema := schema_of(each, VERSIONS[-1])) is not None:
            visit(schema, each, f"{each['kind']} {each['metadata']['name']}")
    return made


def selector_errors(objects: list[Table]) -> list[str]:
    """Selectors that match no pod, ports that the pods do not have, references to objects that there are not."""
    templates = pod_templates(objects)
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    made = []

    def matching(selector: Table, where: str) -> list[PodTemplate]:
        pods = [t for t in templates if selector.items() <= t.labels.items()]
        if not pods:
            made.append(f"{where}: the selector matches no pod: {selector}")
        return pods

    def check_port(pods: list[PodTemplate], port: str, where: str) -> None:
        for pod in pods:
            if port not in {p["name"] for c in pod.containers() for p in c.get("ports", ())}:
                made.append(f"{where}: the pods of {pod.where} have no port {port}")

    for each in objects:
        where, spec = f"{each['kind']} {each['metadata']['name']}", each.get("spec", {})
        if each["kind"] == "Service":
            pods = matching(spec["selector"], where)
            for port in spec["ports"]:
                check_port(pods, port["targetPort"], where)
        elif each["kind"] in ("PodDisruptionBudget", "Deployment", "PodMonitor"):
            pods = matching(spec["selector"]["matchLabels"], where)
            for endpoint in spec.get("podMetricsEndpoints", ()):
                check_port(pods, endpoint["port"], where)
        elif each["kind"] == "ScaledObject":
            made += _scale_errors(spec["scaleTargetRef"], objects, where)
    for pod in templates:
        for spread in pod.spec["topologySpreadConstraints"]:
            if not spread["labelSelector"]["matchLabels"].items() <= pod.labels.items():
                made.append(f"{pod.where}: topologySpreadConstraints do not count the pod itself")
        volumes = {volume["name"] for volume in pod.spec["volumes"]}
        for volume in pod.spec["volumes"]:
            if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in names:
                made.append(f"{pod.where}: no ConfigMap {volume['configMap']['name']}")
        for container in pod.containers():
            mounts = container.get("volumeMounts", [])
            made += [f"{pod.where}: no volume {m['name']}" for m in mounts if m["name"] not in volumes]
            if len({m["mountPath"] for m in mounts}) < len(mounts):
                made.append(f"{pod.where}: two mounts at one path")
    return made


def dial_errors(objects: list[Table]) -> list[str]:
    """Workers that dial no Service, or one that hides a coordinator until they have joined it."""
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    made = []
    for pod in pod_templates(objects):
        config, _ = parse_command(pod.spec["containers"][0]["command"])
        if not isinstance(config, WorkerConfig):
            continue
        host, _, port = config.coordinator.rpartition(":")
        spec = services.get(host, {"ports": []})
        if int(port) not in [each["port"] for each in spec["ports"]]:
            made.append(f"{pod.where}: no Service has {config.coordinator}, which its workers dial")
        elif not spec.get("publishNotReadyAddresses"):
            made.append(f"{pod.where}: Service {host} has no coordinator until one is ready, which needs workers")
    return made


def _scale_errors(target: Table, objects: list[Table], where: str) -> list[str]:
    scalable = {
        ("LeaderWorkerSet", each["metadata"]["name"]) for each in objects if each["kind"] == "LeaderWorkerSet"
    } | {
        ("DisaggregatedSetRoleScaler", f"{each['metadata']['name']}-{role['name']}")
        for each in objects
        if each["kind"] == "DisaggregatedSet"
        for role in each["spec"]["roles"]
        if role.get("scaling", {}).get("mode") == "External"
    }
    known = f"{target['apiVersion']} {target['kind']}" in SCHEMAS["kinds"]["crds"]
    if known and (target["kind"], target["name"]) in scalable:
        return []
    return [f"{where}: there will be no {target['kind']} {target['name']} to scale"]


def probe_errors(objects: list[Table]) -> list[str]:
    """Containers that serve and have no probe, and probes of ports that the container does not list."""
    made = []
    for pod in pod_templates(objects):
        for container in pod.spec["containers"]:
            ports = {p["name"]: p["containerPort"] for p in container.get("ports", ())}
            probes = {k: v for k, v in container.items() if k.endswith("Probe")}
            config, _ = parse_command(container["command"])
            opened = {getattr(config, f.name) for f in fields(config) if f.name.endswith("port")} if config else set()
            if ports and len(probes) < 3:
                made.append(f"{pod.where}: {container['name']} has only {', '.join(probes) or 'no probe'}")
            if pod.leads and pod.group and not ports:
                made.append(f"{pod.where}: the leader has no port to probe")
            for name, probe in probes.items():
                port = probe["grpc"]["port"] if "grpc" in probe else probe["httpGet"]["port"]
                if port not in (*ports, *ports.values()):
                    made.append(f"{pod.where}: {name} of {container['name']}: no port {port}")
                elif ports.get(port, port) not in opened:
                    made.append(f"{pod.where}: {name} of {container['name']}: the command does not open port {port}")
    return made


def grace_errors(objects: list[Table]) -> list[str]:
    """Pods that would be killed while they drain."""
    made = []
    for pod in pod_templates(objects):
        for container in pod.spec["containers"]:
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            config, _ = parse_command(container["command"])
            if config and pod.spec["terminationGracePeriodSeconds"] < sleep + config.drain_timeout_s + 10:
                grace = f"{pod.spec['terminationGracePeriodSeconds']} s"
                made.append(f"{pod.where}: {container['name']} drains for {config.drain_timeout_s} s within {grace}")
    return made


def command_errors(objects: list[Table]) -> list[str]:
    """Commands that Baton refuses, variables that nothing sets, and options that a Service's variables would set."""
    made = []
    for pod in pod_templates(objects):
        if pod.spec.get("enableServiceLinks", True):
            made.append(f"{pod.where}: the variables of Services would be read as options")
        for container in pod.containers():
            where = f"{pod.where}: {container['name']}"
            known = {env["name"] for env in container["env"]} | set(LWS_VARIABLES if pod.group else ())
            for name in {n for word in container["command"] for n in _VARIABLE.findall(word) if n} - known:
                made.append(f"{where}: nothing sets {name}")
            for env in container["env"]:
                path = env.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                labels = {*pod.labels, *(LWS_LABELS if pod.group else ())}
                labels |= {REVISION_LABEL, SLICE_LABEL} if pod.where.startswith("DisaggregatedSet") else set()
                if (label := re.fullmatch(r"metadata.labels\['(.+)'\]", path)) and label[1] not in labels:
                    made.append(f"{where}: {env['name']}: pods have no label {label[1]}")
            if container["command"][0] == "python":
                _, error = parse_command(container["command"])
                made += [f"{where}: {error}"] if error else []
    return made


def parse_command(command: list[str]) -> tuple[Any, str]:
    """Returns the config that a command gives its process, as the process itself parses it, with values for variables;
    None with the reason if the process would refuse it."""
    sizes = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    words = [expand(word, {**dict.fromkeys(_names([word]), "10.0.0.1"), **sizes}) for word in command]
    program, arguments = words[2], words[3:]
    made: list[Any] = []
    try:
        if program == "launch.agent":
            job = parse_job(arguments)
            program, arguments = job.module, list(job.arguments)
        parser = config_command(CONFIGS[program], name=program, help=program)(lambda config: made.append(config))
        parser.main(args=arguments, standalone_mode=False)
    except (click.ClickException, StartupError, SystemExit) as error:
        return None, str(error)
    return made[0], ""


def expand(text: str, variables: dict[str, str]) -> str:
    """Expands `$(NAME)` as the kubelet does: unknown ones remain, and `$$` is a `$`."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _VARIABLE.sub(replaced, text)


def _names(words: list[str]) -> Iterator[str]:
    return (name for word in words for name in _VARIABLE.findall(word) if name)


def all_errors(objects: list[Table]) -> list[str]:
    made = [error for version in VERSIONS for error in schema_errors(objects, version)]
    for check in (rule_errors, selector_errors, dial_errors, probe_errors, grace_errors, command_errors):
        made += check(objects)
    return made
