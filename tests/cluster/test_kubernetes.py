"""Every container command of emitted objects runs as written and serves: in pods of network namespaces."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from launch.cli import baton
from tests.support import kubernetes, netns
from tests.support.checkpoints import make_checkpoint
from tests.support.kubelet import Pod, pods
from tests.support.kubernetes import PodTemplate, Table, pod_templates

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


def emit(where: Path, *options: str, on: str, coordinator: str = "") -> list[Table]:
    models = where / "models"
    make_checkpoint(models / "m", "llama")
    (where / "t.toml").write_text(TOPOLOGY.format(models=models, on=on, coordinator=coordinator))
    given = ["--models-claim", "models", "--out", str(where / "out"), *options]
    done = CliRunner().invoke(baton, ["emit", "kubernetes", str(where / "t.toml"), *given])
    assert done.exit_code == 0, done.output or done.exception
    objects = list(yaml.safe_load_all((where / "out/objects.yaml").read_text()))
    assert kubernetes.all_errors(objects) == []
    return objects


def groups_of(objects: list[Table]) -> dict[str, list[PodTemplate]]:
    """One group of each pool, and the coordinator."""
    made: dict[str, list[PodTemplate]] = {}
    for template in pod_templates(objects):
        made.setdefault(template.labels["app.kubernetes.io/component"], []).append(template)
    return made


def complete(front: Pod, **options: object) -> int:
    body = {"model": "m", "prompt": [30, 31, 32], "max_tokens": 4, "temperature": 0}
    answer = front.request("POST", f"http://{front.node.address}:8100/v1/completions", json=body, **options)
    assert answer.is_success, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def test_emitted_commands_serve_and_drain_in_pods(tmp_path: Path) -> None:
    """A prefill worker of two pods; keys, so that metrics are on the admin port; files and batches."""
    objects = emit(tmp_path, "--prefill-max", "2", "--decode-max", "2", on=OVER_TWO_PODS, coordinator=KEYS)
    files = {"token": TOKEN, "api-keys": f"{KEY}\n".encode()}
    with pods(objects, groups_of(objects), tmp_path, files, tmp_path / "models") as running:
        front, leader, follower, decode = (running[n] for n in ("coordinator", "prefill", "prefill-1", "decode"))
        starting = [threading.Thread(target=pod.start) for pod in running.values()]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(120)
        for pod in running.values():
            for kind in ("startup", "readiness", "liveness"):
                pod.probe(kind)
        bearer = {"headers": {"authorization": f"Bearer {KEY}"}}
        assert complete(front, **bearer) == 4
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

        follower.terminate()  # a node that is drained may hold any pod of the group
        assert (follower.ends(), leader.ends()) == ({"prefill": 0}, {"prefill": 0}), leader.logs() + follower.logs()
        front.terminate()
        assert front.ends() == {"coordinator": 0, "batches": 0}, front.logs()
        assert decode.ends() == {"decode": 0}, decode.logs()
