"""Every container command of emitted objects runs as written and serves: in pods of network namespaces."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner

from launch.certificates import make_certificates
from launch.cli import baton
from tests.support import kubernetes, netns
from tests.support.checkpoints import make_checkpoint
from tests.support.kubelet import Pod, pods
from tests.support.kubernetes import PodTemplate, Table, objects_of, pod_templates

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(480),
    pytest.mark.skipif(bool(reason := netns.missing()), reason=reason or "never"),
]
TOKEN = b"a cluster token of more than sixteen characters\n"
KEY = "sk-0123456789abcdef0123456789abcdef"
TOPOLOGY = """
model = "{models}/m"
served_model_name = "m"
[options]
device = "cpu"
dtype = "float32"
kv_memory_gib = 0.02
drain_timeout_s = 20
cluster_token_file = "/etc/baton/secrets/token"
{options}
[[nodes]]
name = "a"
cores = 2
[[nodes]]
name = "b"
cores = 2
[coordinator]
node = "a"
{coordinator}
[batches]
data_dir = "/etc/baton/data"
[[prefill]]
{on}
[[decode]]
node = "b"
"""
OVER_TWO_PODS = 'nodes = ["a", "b"]\ntensor_parallel = 2\nrendezvous_port = 9000'
KEYS = 'api_key_file = "/etc/baton/keys/api-keys"'


def emit(where: Path, *flags: str, on: str, coordinator: str = "", options: str = "") -> list[Table]:
    models = where / "models"
    make_checkpoint(models / "m", "llama")
    (where / "t.toml").write_text(TOPOLOGY.format(models=models, on=on, coordinator=coordinator, options=options))
    given = ["--models-claim", "models", "--out", str(where / "out"), *flags]
    done = CliRunner().invoke(baton, ["emit", "kubernetes", str(where / "t.toml"), *given])
    assert done.exit_code == 0, done.output or done.exception
    objects = objects_of((where / "out/objects.yaml").read_text())
    assert kubernetes.all_errors(objects) == []
    return objects


def groups_of(objects: list[Table]) -> dict[str, list[PodTemplate]]:
    """One group of each pool, and the coordinator."""
    made: dict[str, list[PodTemplate]] = {}
    for template in pod_templates(objects):
        made.setdefault(template.labels["app.kubernetes.io/component"], []).append(template)
    return made


def start_all(running: dict[str, Pod]) -> None:
    """Starts all pods at once, and waits until every probe succeeds."""
    with ThreadPoolExecutor(len(running)) as threads:
        list(threads.map(Pod.start, running.values()))
    for pod in running.values():
        for kind in ("startup", "readiness", "liveness"):
            pod.probe(kind)


def complete(front: Pod, url: str, **options: object) -> int:
    body = {"model": "m", "prompt": [30, 31, 32], "max_tokens": 4, "temperature": 0}
    answer = front.request("POST", f"{url}/v1/completions", json=body, **options)
    assert answer.is_success, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def test_emitted_commands_serve_and_drain_in_pods(tmp_path: Path) -> None:
    """A prefill worker of two pods; keys, so that metrics are on the admin port; files and batches."""
    objects = emit(tmp_path, "--prefill-max", "2", "--decode-max", "2", on=OVER_TWO_PODS, coordinator=KEYS)
    files = {"token": TOKEN, "api-keys": f"{KEY}\n".encode()}
    with pods(objects, groups_of(objects), tmp_path, files, tmp_path / "models") as running:
        front, leader, follower, decode = (running[n] for n in ("coordinator", "prefill", "prefill-1", "decode"))
        start_all(running)
        bearer = {"headers": {"authorization": f"Bearer {KEY}"}}
        assert complete(front, f"http://{front.node.address}:8100", **bearer) == 4
        models = front.get(f"http://{front.node.address}:8100/v1/models")
        assert models.status_code == 401
        batches = front.get(f"http://{front.node.address}:8100/v1/batches", **bearer)
        assert batches.is_success, batches.text

        (monitor,) = [each for each in objects if each["kind"] == "PodMonitor"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == "admin"
        metrics = front.get(f"http://{front.node.address}:8103{endpoint['path']}").text
        for scaled in (each for each in objects if each["kind"] == "ScaledObject"):
            for name in re.findall(r"\bbaton_\w+", scaled["spec"]["triggers"][0]["metadata"]["query"]):
                assert f"\n{name}{{" in metrics or f"\n{name} " in metrics, name
        ids = set(re.findall(r'baton_worker_up\{.*worker="([^"]+)"', metrics))
        assert ids == {"prefill-0", "decode-0"}
        workers = front.get(f"http://{front.node.address}:8103/workers").json()["workers"]
        assert [worker["revision"] for worker in workers] == ["5f0c2a91"] * 2

        follower.terminate()  # a node that is drained may hold any pod of the group
        assert (follower.ends(), leader.ends()) == ({"prefill": 0}, {"prefill": 0}), leader.logs() + follower.logs()
        front.terminate()
        assert front.ends() == {"coordinator": 0, "batches": 0}, front.logs()
        decode.terminate()
        assert decode.ends() == {"decode": 0}, decode.logs()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus")
def test_a_cluster_with_tls_is_measured_and_survives_a_new_coordinator(tmp_path: Path) -> None:
    """LeaderWorkerSets; the queries of the ScaledObjects are answered by a real Prometheus."""
    made = {path.name: path for path in make_certificates(tmp_path / "tls", ("front",), 30)}
    tls = {name: path.read_bytes() for name, path in made.items()}
    front_tls = 'tls_cert_file = "/etc/baton/tls/server.pem"\ntls_key_file = "/etc/baton/tls/server-key.pem"\n'
    objects = emit(
        tmp_path,
        *("--sets", "leaderworkerset", "--prefill-max", "2", "--decode-max", "2"),
        on='node = "b"',
        coordinator=front_tls + 'store = true\ndata_dir = "/etc/baton/responses"',
        options='cluster_tls_dir = "/etc/baton/tls"',
    )
    with pods(objects, groups_of(objects), tmp_path, {"token": TOKEN, **tls}, tmp_path / "models") as running:
        front = running["coordinator"]
        start_all(running)
        url = f"https://{front.node.address}:8100"
        assert complete(front, url) == 4
        with prometheus(front, objects) as ask:
            for scaled in (each for each in objects if each["kind"] == "ScaledObject"):
                trigger = scaled["spec"]["triggers"][0]["metadata"]
                assert trigger["ignoreNullValues"] == "false"
                (sample,) = ask(trigger["query"])
                assert 0 <= float(sample["value"][1]) < 2, (trigger, sample)
        front.terminate()
        assert set(front.ends().values()) == {0}, front.logs()
        front.start()
        front.probe("readiness")  # the workers join the new coordinator
        assert complete(front, url) == 4
        assert all(process.poll() is None for pod in running.values() for process in pod.running.values())


def test_a_damaged_model_keeps_a_pod_from_starting(tmp_path: Path) -> None:
    objects = emit(tmp_path, on='node = "b"')
    weights = tmp_path / "models/m/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    groups = {"decode": groups_of(objects)["decode"]}
    with pods(objects, groups, tmp_path, {"token": TOKEN}, tmp_path / "models") as running:
        with pytest.raises(AssertionError, match=r"verify-models ended with 1\n.*m/model.safetensors: FAILED"):
            running["decode"].start()
        assert not running["decode"].running


@contextlib.contextmanager
def prometheus(front: Pod, objects: list[Table]) -> Iterator[Callable[[str], list[Any]]]:
    """Runs Prometheus in the coordinator's namespace, as its operator would configure it; yields what asks it, until
    it has scraped long enough for rates."""
    (monitor,) = [each for each in objects if each["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = [c for c in front.template.spec["containers"] if c["name"] == "coordinator"]
    port = {p["name"]: p["containerPort"] for p in container["ports"]}[endpoint["port"]]
    scrape = {
        "job_name": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}",
        "metrics_path": endpoint["path"],
        "static_configs": [{"targets": [f"{front.node.address}:{port}"]}],
    }
    file = front.where / "prometheus.yml"
    file.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={front.where / 'tsdb'}"]
    address = f"{front.node.address}:9090"
    process = front.node.start([*command, f"--web.listen-address={address}", "--log.level=error"])

    def ask(query: str) -> list[Any]:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = front.get(f"http://{address}/api/v1/query", params={"query": query}).json()
                assert answer["status"] == "success", (query, answer)
                if answer["data"]["result"]:
                    return list(answer["data"]["result"])
            assert time.monotonic() < deadline and process.poll() is None, query
            time.sleep(0.5)

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(20)
