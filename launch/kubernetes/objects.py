"""The objects of a cluster: its workloads, Services, disruption budgets, claims and checksums. Pure.

One Deployment runs the coordinator, and the batches process beside it. The pools are roles of a DisaggregatedSet, or
one LeaderWorkerSet each: every worker is a group of pods, its leader first. Both come from the LeaderWorkerSet project.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import StartupError
from launch.kubernetes.config import KubernetesConfig
from launch.kubernetes.files import ALL, CHECKSUMS_DIR, WITHOUT_WEIGHTS, secret_paths, secret_volumes
from launch.kubernetes.pods import PodPlan, PodPool
from launch.kubernetes.scaling import check_scaling, highest, pod_monitor, scaled_object
from launch.plan import BATCHES, COORDINATOR

Table = dict[str, Any]

PRE_STOP_S = 10
"""How long a coordinator that is to end accepts requests still: until the removal of its endpoint has spread."""
AFTER_DRAIN_S = 15
"""After a drain: workers acknowledge within 5 s, then the servers stop within 8 s."""
_PROBE = {"timeoutSeconds": 5}
_USER = 1000
"""That of the image."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_REFERENCE = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_QUALIFIED = re.compile(rf"({_REFERENCE.pattern}/)?[A-Za-z0-9]([-._A-Za-z0-9]{{0,61}}[A-Za-z0-9])?")
"""A label's key or a resource's name."""
_IMAGE = re.compile(r"[a-zA-Z0-9][-._:/@a-zA-Z0-9]*")
_NAME_CHARS = 47
"""Name and role together, so that the names derived from them are labels (63): the webhook of DisaggregatedSet."""


@dataclass(frozen=True, slots=True)
class Models:
    """Where models are mounted, and the content of the ConfigMap that verifies them; empty if they are in the image."""

    directory: str = ""
    checksums: Mapping[str, str] | None = None


class ClusterObjects:
    """Makes the objects of one plan."""

    def __init__(self, pods: PodPlan, config: KubernetesConfig, models: Models) -> None:
        """
        Raises:
            StartupError: a name is not valid, or too long.
        """
        self._pods, self._config, self._models = pods, config, models
        self._place = pods.plan.topology.coordinator.config
        for given, flag in ((config.name, "--name"), (config.namespace, "--namespace")):
            if _NAME.fullmatch(given) is None:
                raise StartupError(
                    f"{flag} {given!r} must be lower-case letters, digits and -, and begin with a letter"
                )
        references = {"--secret": config.secret} | ({"--models-claim": config.models_claim} if models.directory else {})
        for flag, given in references.items():
            if _REFERENCE.fullmatch(given) is None:
                raise StartupError(f"{flag} {given!r} must be lower-case letters, digits, - and .")
        keys = {"--gpu-resource": config.gpu_resource, "--spread-over": config.spread_over}
        keys |= {"--domain-label": config.domain_label} if config.domain_label else {}
        for flag, given in keys.items():
            if _QUALIFIED.fullmatch(given) is None:
                raise StartupError(f"{flag} {given!r} must be a qualified name, such as example.com/name")
        if _IMAGE.fullmatch(config.image) is None:
            raise StartupError(f"--image {config.image!r} must be an image reference: letters, digits and -._:/@")
        longest = max((COORDINATOR, *(pool.name for pool in pods.pools)), key=len)
        if len(config.name) + len(longest) > _NAME_CHARS:
            raise StartupError(f"--name {config.name} is too long: at most {_NAME_CHARS - len(longest)} characters")

    def objects(self) -> list[Table]:
        """Returns all objects, each after those that it refers to.

        Raises:
            StartupError: the plan cannot run in pods, with the reason.
        """
        config, pools = self._config, self._pods.pools
        check_scaling(config, pools)
        self._check_labels()
        made = [*self._checksums(), *self._claims(), *self._services(), self._deployment(), *self._sets()]
        made += [self._budget(name) for name in (COORDINATOR, *(pool.name for pool in pools))]
        for pool in pools:
            if highest(config, pool.role):
                job = f"{config.namespace}/{self._name(COORDINATOR)}"
                spec = scaled_object(config, pool, self._scale_target(pool), job, self._grace_s(pool))
                made.append(self._object("keda.sh/v1alpha1", "ScaledObject", self._name(pool.name), spec, pool.name))
        if config.pod_monitor:
            port = "admin" if self._pods.plan.admin else "http"
            spec = pod_monitor(self._selector(COORDINATOR), port)
            api = "monitoring.coreos.com/v1"
            made.append(self._object(api, "PodMonitor", self._name(COORDINATOR), spec, COORDINATOR))
        return made

    def _name(self, component: str) -> str:
        return f"{self._config.name}-{component}"

    def _selector(self, component: str) -> Table:
        return {"app.kubernetes.io/instance": self._config.name, "app.kubernetes.io/component": component}

    def _labels(self, component: str) -> Table:
        return {"app.kubernetes.io/name": "baton", **self._selector(component)}

    def _object(self, api: str, kind: str, name: str, spec: Table, component: str) -> Table:
        metadata = {"name": name, "namespace": self._config.namespace, "labels": self._labels(component)}
        return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}

    def _checksums(self) -> list[Table]:
        if self._models.checksums is None:
            return []
        made = self._object("v1", "ConfigMap", self._checksums_name, {}, COORDINATOR)
        del made["spec"]
        return [{**made, "immutable": True, "data": dict(self._models.checksums)}]

    @property
    def _checksums_name(self) -> str:
        """The name changes with the content, so that other models are a rollout."""
        text = "".join((self._models.checksums or {}).values())
        return f"{self._name('checksums')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def _data_directories(self) -> dict[str, tuple[str, float]]:
        """Returns the directories that are kept, by claim, with their size in MiB."""
        batches = self._pods.plan.topology.batches
        made = {} if batches is None else {BATCHES: (batches.config.data_dir, batches.config.max_data_mib)}
        if self._place.store:
            made["responses"] = (self._place.data_dir, self._place.responses_mib)
        return made

    def _claims(self) -> list[Table]:
        """A claim is a GiB larger than the files in it, for their database."""
        made = []
        for name, (_, size_mib) in self._data_directories().items():
            storage = {"requests": {"storage": f"{math.ceil(size_mib / 1024) + 1}Gi"}}
            spec = {"accessModes": ["ReadWriteOnce"], "resources": storage}
            made.append(self._object("v1", "PersistentVolumeClaim", self._name(name), spec, COORDINATOR))
        return made

    def _services(self) -> list[Table]:
        """One Service for clients, one for workers and operators. Workers dial a coordinator that is not ready: without
        them it will not become ready."""
        public = {"http": self._place.port, "grpc": self._place.grpc_port}
        own = {"control": self._place.control_port} | ({"admin": self._place.admin_port} if self._has_admin else {})
        made = []
        for name, ports, early in ((self._config.name, public, False), (self._name(COORDINATOR), own, True)):
            listed = [{"name": port, "port": number, "targetPort": port} for port, number in ports.items()]
            spec: Table = {"selector": self._selector(COORDINATOR), "ports": listed}
            if early:
                spec["publishNotReadyAddresses"] = True
            made.append(self._object("v1", "Service", name, spec, COORDINATOR))
        return made

    @property
    def _has_admin(self) -> bool:
        return bool(self._pods.plan.admin)

    def _budget(self, component: str) -> Table:
        selector = {"matchLabels": self._selector(component)}
        spec = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}
        return self._object("policy/v1", "PodDisruptionBudget", self._name(component), spec, component)

    def _deployment(self) -> Table:
        """One coordinator: workers keep a session with one. It ends before the next one starts, since its port and its
        claims are its own."""
        topology = self._pods.plan.topology
        scheme = "HTTPS" if self._place.tls_cert_file else "HTTP"

        def probe(path: str, period_s: int, failures: int) -> Table:
            request = {"path": path, "port": "http", "scheme": scheme}
            return {"httpGet": request, "periodSeconds": period_s, "failureThreshold": failures, **_PROBE}

        ports = {"http": self._place.port, "grpc": self._place.grpc_port, "control": self._place.control_port}
        if self._has_admin:
            ports["admin"] = self._place.admin_port
        main = self._container(COORDINATOR, self._pods.coordinator_command(), ports)
        main["startupProbe"] = probe("/live", 2, 150)
        main["livenessProbe"] = probe("/live", 10, 3)
        main["readinessProbe"] = probe("/ready", 2, 3)
        main["resources"] = {"requests": {"cpu": "1"}}
        main["lifecycle"] = {"preStop": {"sleep": {"seconds": PRE_STOP_S}}}
        containers, options = [main], [topology.coordinator.options]
        if topology.batches is not None:
            second = self._container(BATCHES, self._pods.batches_command(), {})
            second["lifecycle"] = main["lifecycle"]
            containers.append(second)
            options.append(topology.batches.options)
        secrets = [path for given in options for path in secret_paths(given, COORDINATOR)]
        mounts = []
        for name, (directory, _) in self._data_directories().items():
            claim = {"claimName": self._name(name)}
            mount = {"name": name, "mountPath": directory}
            mounts.append(({"name": name, "persistentVolumeClaim": claim}, mount))
        drains = [place.config.drain_timeout_s for place in (topology.coordinator, topology.batches) if place]
        grace_s = PRE_STOP_S + math.ceil(max(drains)) + AFTER_DRAIN_S
        template = self._template(COORDINATOR, containers, secrets, mounts, WITHOUT_WEIGHTS, grace_s)
        spec = {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": self._selector(COORDINATOR)},
            "template": template,
        }
        return self._object("apps/v1", "Deployment", self._name(COORDINATOR), spec, COORDINATOR)

    def _sets(self) -> list[Table]:
        config, pools = self._config, self._pods.pools
        if config.sets == "leaderworkerset":
            api, kind = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
            return [self._object(api, kind, self._name(pool.name), self._set(pool), pool.name) for pool in pools]
        if not 2 <= len(pools) <= 10:
            reason = f"a DisaggregatedSet has 2 to 10 roles, this topology has {len(pools)} pools"
            raise StartupError(f"{reason}; use --sets leaderworkerset")
        roles = []
        for pool in pools:
            scaling = {"scaling": {"mode": "External"}} if highest(config, pool.role) else {}
            roles.append({"name": pool.name, **scaling, "spec": self._set(pool)})
        spec = {"slices": 1, "roles": roles}
        return [self._object("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", config.name, spec, "workers")]

    def _scale_target(self, pool: PodPool) -> Table:
        name = self._name(pool.name)
        if self._config.sets == "leaderworkerset":
            return {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": name}
        # The controller makes it for a role that is scaled from outside.
        return {"apiVersion": "disaggregatedset.x-k8s.io/v1", "kind": "DisaggregatedSetRoleScaler", "name": name}

    def _set(self, pool: PodPool) -> Table:
        """Returns the spec of the pool's LeaderWorkerSet. All pods of a group restart together: ranks of a worker
        cannot be replaced one by one. One that was scaled from outside has no number here, which would reset it."""
        config = self._config
        template: Table = {
            "size": pool.size,
            "restartPolicy": "None" if pool.size == 1 else "RecreateGroupOnPodRestart",
        }
        if pool.size == 1:
            template["workerTemplate"] = self._worker(pool, 0)
        else:
            template |= {"leaderTemplate": self._worker(pool, 0), "workerTemplate": self._worker(pool, 1)}
        return {
            **({} if highest(config, pool.role) else {"replicas": pool.replicas}),
            "leaderWorkerTemplate": template,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
        }

    def _check_labels(self) -> None:
        """Raises StartupError if the topology has an option that pods get from a label: flags would prevail."""
        for worker in self._pods.plan.topology.workers:
            revision, domain = worker.config.revision, worker.config.domain
            if self._config.sets == "disaggregatedset" and revision:
                given = f"revision {revision!r} in the topology: each rollout of a DisaggregatedSet has its own"
                raise StartupError(f"{worker.name}: {given}; remove it, or use --sets leaderworkerset")
            if self._config.domain_label and domain:
                given = f"domain {domain!r} in the topology and --domain-label {self._config.domain_label}"
                raise StartupError(f"{worker.name}: {given}: use one of the two")

    def _grace_s(self, pool: PodPool) -> int:
        return math.ceil(pool.parts[0].worker.config.drain_timeout_s) + AFTER_DRAIN_S

    def _worker(self, pool: PodPool, rank: int) -> Table:
        part, port = pool.parts[rank], pool.health_port
        leads, command = rank == 0, self._pods.worker_command(pool, rank, self._name(COORDINATOR))
        container = self._container(pool.role, command, {"health": port} if leads else {})
        if leads:  # the other ranks have no health service: if one hangs or ends, its leader does
            failures = math.ceil(self._config.start_timeout_s / 10)
            live = {"grpc": {"port": port, "service": "live"}, "periodSeconds": 10, **_PROBE}
            container["startupProbe"] = {**live, "failureThreshold": failures}
            container["livenessProbe"] = {**live, "failureThreshold": 6}
            container["readinessProbe"] = {"grpc": {"port": port}, "periodSeconds": 2, "failureThreshold": 3, **_PROBE}
        labels = {
            "GROUP_NAME": "leaderworkerset.sigs.k8s.io/name",
            "GROUP_INDEX": "leaderworkerset.sigs.k8s.io/group-index",
        }
        if self._config.sets == "disaggregatedset":
            # Each rollout is a revision: its workers are paired with each other only, whatever it changes.
            labels["BATON_REVISION"] = "disaggregatedset.x-k8s.io/revision"
        if self._config.domain_label:
            labels["BATON_DOMAIN"] = self._config.domain_label
        container["env"] += [_from_pod(name, f"metadata.labels['{label}']") for name, label in labels.items()]
        threads = {
            k: v for k, v in part.environment.items() if k != "CUDA_VISIBLE_DEVICES"
        }  # the device plugin sets it
        container["env"] += [{"name": name, "value": value} for name, value in threads.items()]
        resources: dict[str, Table] = {"requests": {"cpu": str(max(part.placement.threads, part.ranks))}}
        if gpus := pool.gpus(rank):
            resources["limits"] = {self._config.gpu_resource: str(gpus)}
        container["resources"] = resources
        shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}
        secrets = secret_paths(part.worker.options, pool.role)
        return self._template(pool.name, [container], secrets, [shared], ALL, self._grace_s(pool))

    def _container(self, name: str, command: Sequence[str], ports: Mapping[str, int]) -> Table:
        security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container: Table = {"name": name, "image": self._config.image, "command": list(command)}
        container["env"] = [_from_pod("POD_IP", "status.podIP")]
        if ports:
            container["ports"] = [{"name": port, "containerPort": number} for port, number in ports.items()]
        return {**container, "securityContext": security}

    def _template(
        self,
        component: str,
        containers: list[Table],
        secrets: Sequence[str],
        mounted: Sequence[tuple[Table, Table]],
        checksums: str,
        grace_s: int,
    ) -> Table:
        """Returns the template of a pod; every container has all mounts."""
        pairs = [*mounted, *secret_volumes(self._config.secret, secrets)]
        init: list[Table] = []
        if self._models.directory:
            claim = {"claimName": self._config.models_claim, "readOnly": True}
            mount = {"name": "models", "mountPath": self._models.directory, "readOnly": True}
            pairs.append(({"name": "models", "persistentVolumeClaim": claim}, mount))
            sums = {"name": "checksums", "mountPath": CHECKSUMS_DIR, "readOnly": True}
            pairs.append(({"name": "checksums", "configMap": {"name": self._checksums_name}}, sums))
            command = ["sha256sum", "--check", "--strict", "--quiet", f"{CHECKSUMS_DIR}/{checksums}"]
            verify = self._container("verify-models", command, {})
            init.append({**verify, "workingDir": self._models.directory, "volumeMounts": [mount, sums]})
        mounts = [mount for _, mount in pairs]
        where = [mount["mountPath"].rstrip("/") for mount in mounts]
        if twice := [path for path in where if where.count(path) > 1]:
            raise StartupError(
                f"{twice[0]} would be the mount of two volumes: put the files into different directories"
            )
        for container in containers:
            container["volumeMounts"] = mounts
        spread = {"maxSkew": 1, "topologyKey": self._config.spread_over, "whenUnsatisfiable": "ScheduleAnyway"}
        spec = {
            "automountServiceAccountToken": False,
            # The variables of a Service named baton would be read as options: BATON_PORT.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [{**spread, "labelSelector": {"matchLabels": self._selector(component)}}],
            **({"initContainers": init} if init else {}),
            "containers": containers,
            "volumes": [volume for volume, _ in pairs],
        }
        return {"metadata": {"labels": self._labels(component)}, "spec": spec}


def _from_pod(name: str, path: str) -> Table:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
