"""Runs pods of Kubernetes objects on this machine, each in a network namespace: every container's command as written,
as process 1 of its own process namespace, with the variables, mounts and host names that the object would give it.

    with pods(objects, {"front": (template, {}), ...}) as running:
        running["front"].start()

What an API server, a controller or a node would add is here as little as Baton can see: addresses, the labels and
variables of a LeaderWorkerSet, names of Services, the files of a Secret, a ConfigMap and a claim. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support import netns
from tests.support.kubernetes import LWS_LABELS, REVISION_LABEL, PodTemplate, Table, expand

CONTAINER_PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT = Path(__file__).parents[2]


@dataclass
class Pod:
    """A pod on one node. `variables` are those of its set; `volumes` are directories, by the name of a volume."""

    name: str
    template: PodTemplate
    node: netns.Node
    where: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Path] = field(default_factory=dict)
    hosts: str = ""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Runs the init containers one after the other, then starts the containers."""
        for container in self.template.spec.get("initContainers", []):
            code = self._run(container).wait(60)
            assert code == 0, f"{self.name}: {container['name']} ended with {code}\n{self.log(container['name'])}"
        for container in self.template.spec["containers"]:
            self.running[container["name"]] = self._run(container)

    def environment(self, container: Table) -> dict[str, str]:
        env = dict(self.variables)
        for entry in container["env"]:
            value = entry.get("value")
            if value is None:
                path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                if label := re.fullmatch(r"metadata.labels\['(.+)'\]", path):
                    value = {**self.template.labels, **self.labels}.get(label[1], "")
                else:
                    value = {"status.podIP": self.node.address, "metadata.name": self.name}[path]
            env.setdefault(entry["name"], expand(value, env))
        return env

    def _run(self, container: Table) -> subprocess.Popen[bytes]:
        env = self.environment(container)
        command = [expand(word, env) for word in container["command"]]
        scratch = Path(tempfile.mkdtemp(prefix=f"{self.name}-{container['name']}-", dir=self.where))
        for name in ("upper", "work"):
            (scratch / name).mkdir(parents=True)
        overlay = f"lowerdir=/etc,upperdir={scratch / 'upper'},workdir={scratch / 'work'}"
        lines = [
            f"mount -t overlay overlay -o {shlex.quote(overlay)} /etc",
            f"printf %s {shlex.quote(self.hosts)} >>/etc/hosts",
        ]
        for mount in container["volumeMounts"]:
            at, (volume,) = mount["mountPath"], [v for v in self.template.spec["volumes"] if v["name"] == mount["name"]]
            lines.append(f"mkdir -p {shlex.quote(at)}")
            if "emptyDir" in volume:
                lines.append(f"mount -t tmpfs tmpfs {shlex.quote(at)}")
            else:
                lines.append(f"mount --bind {shlex.quote(str(self.volumes[mount['name']]))} {shlex.quote(at)}")
                if mount.get("readOnly"):
                    lines.append(f"mount -o remount,bind,ro {shlex.quote(at)}")
        lines.append(f"cd {shlex.quote(container.get('workingDir', '/'))}")
        image = {"PATH": CONTAINER_PATH, "HOME": str(scratch), "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        image["BATON_CACHE_DIR"] = os.environ.get("BATON_CACHE_DIR", str(Path.home() / ".cache/baton"))
        lines.append("exec unshare --pid --fork --kill-child --mount-proc -- " + shlex.join(command))
        with self._log(container["name"]).open("wb") as log:
            script = "set -e\n" + "\n".join(lines)
            return self.node.start(["sh", "-c", script], stdout=log, stderr=log, env={**image, **env})

    def _log(self, container: str) -> Path:
        return self.where / f"{self.name}-{container}.log"

    def log(self, container: str) -> str:
        return self._log(container).read_text(errors="replace")[-4000:]

    def logs(self) -> str:
        return "\n".join(f"--- {self.name} {name}\n{self.log(name)}" for name in self.running)

    def terminate(self) -> None:
        """Sends SIGTERM to the process 1 of each container, as a kubelet does after the preStop hook."""
        for process in self.running.values():
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)

    def ends(self) -> dict[str, int]:
        """Waits until the containers have ended, as long as a kubelet would; returns their exit codes."""
        deadline = time.monotonic() + self.template.spec["terminationGracePeriodSeconds"]
        return {name: process.wait(deadline - time.monotonic()) for name, process in self.running.items()}

    def probe(self, kind: str, limit_s: float = 180.0) -> None:
        """Waits until the probes of one kind succeed in all containers that have one."""
        for container in self.template.spec["containers"]:
            if f"{kind}Probe" not in container:
                continue
            probe, deadline = container[f"{kind}Probe"], time.monotonic() + limit_s
            while not self._succeeds(container, probe):
                ended = {name: process.poll() for name, process in self.running.items() if process.poll() is not None}
                assert not ended and time.monotonic() < deadline, f"{kind} of {self.name}: {ended}\n{self.logs()}"
                time.sleep(0.2)

    def _succeeds(self, container: Table, probe: Table) -> bool:
        if "grpc" in probe:
            words = [self.node.address, str(probe["grpc"]["port"]), probe["grpc"].get("service", "")]
            check = self.node.start([sys.executable, "-m", "tests.support.grpc_probe", *words], cwd=ROOT)
            return check.wait(60) == 0
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        request = probe["httpGet"]
        url = f"{request['scheme'].lower()}://{self.node.address}:{ports[request['port']]}{request['path']}"
        try:
            return self.get(url).is_success
        except httpx.TransportError:
            return False

    def get(self, url: str, **options: object) -> httpx.Response:
        return self.request("GET", url, **options)

    def request(self, method: str, url: str, **options: object) -> httpx.Response:
        """Sends a request from this pod's namespace."""
        with self.node.threads(1) as thread:
            return thread.submit(
                httpx.request, method, url, timeout=60, verify=False, trust_env=False, **options
            ).result()


@contextlib.contextmanager
def pods(
    objects: list[Table], groups: Mapping[str, list[PodTemplate]], where: Path, files: Mapping[str, bytes], models: Path
) -> Iterator[dict[str, Pod]]:
    """Yields the pods of `groups`, by name: the leader of a group has its name, its followers are NAME-1 and so on.
    `files` is the content of the Secret, `models` the claim."""
    config_maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    names = [f"{group}-{n}" if n else group for group, templates in groups.items() for n in range(len(templates))]
    with netns.nodes(*names) as network:
        made: dict[str, Pod] = {}
        for group, templates in groups.items():
            labels = {**dict(zip(LWS_LABELS, (group, "0"), strict=True)), REVISION_LABEL: "5f0c2a91"}
            for n, template in enumerate(templates):
                name = f"{group}-{n}" if n else group
                pod = Pod(name, template, network[name], where, labels)
                if template.group:
                    size = {"LWS_GROUP_SIZE": str(len(templates)), "LWS_WORKER_INDEX": str(n)}
                    pod.variables = {"LWS_LEADER_ADDRESS": f"{group}.{group}.default", **size}
                pod.volumes = _volumes(pod, files, config_maps, models)
                made[name] = pod
        hosts = "".join(f"{network[group].address} {group}.{group}.default\n" for group in groups)
        for service in (each for each in objects if each["kind"] == "Service"):
            for pod in made.values():
                if service["spec"]["selector"].items() <= pod.template.labels.items():
                    hosts += f"{pod.node.address} {service['metadata']['name']}\n"
        for pod in made.values():
            pod.hosts = hosts
        yield made


def _volumes(pod: Pod, files: Mapping[str, bytes], config_maps: Mapping[str, Table], models: Path) -> dict[str, Path]:
    made = {}
    for volume in pod.template.spec["volumes"]:
        directory = pod.where / f"{pod.name}-volume-{volume['name']}"
        if volume["name"] == "models":
            directory = models
        elif "emptyDir" not in volume:
            directory.mkdir()
        for item in volume.get("secret", {}).get("items", ()):
            (directory / item["path"]).write_bytes(files[item["key"]])
            (directory / item["path"]).chmod(volume["secret"]["defaultMode"])
        if "configMap" in volume:
            for name, text in config_maps[volume["configMap"]["name"]].items():
                (directory / name).write_text(text)
        made[volume["name"]] = directory
    return made
