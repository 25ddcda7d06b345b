"""A topology file started on one machine: the nodes of the cluster are loopback addresses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support import forks
from tests.support.checkpoints import make_checkpoint
from tests.support.launchers import find_box
from tests.support.topologies import free_ports, loopback_topology

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
UP = (sys.executable, "-m", "launch.cli", "up", "--topology")


def start(topology: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        words = [*UP, str(topology), "--run-dir", str(out.with_suffix("")), *flags]
        return forks.start(words, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})


def until(condition, what: str, *outputs: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        output = "\n".join(path.read_text(errors="replace") for path in outputs)
        assert time.monotonic() < deadline, f"no {what}\n{output}"
        time.sleep(0.1)


def ask(topology: Path) -> httpx.Response:
    port = tomllib.loads(topology.read_text())["coordinator"]["port"]
    body = {"model": "m", "prompt": [30, 31, 32], "max_tokens": 4, "temperature": 0}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)


def test_each_node_starts_its_own_processes_and_the_cluster_is_ready_once_all_joined(tmp_path: Path) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"))
    (probed,) = free_ports(1)
    topology.write_text(topology.read_text().replace("[[prefill]]\n", f"[[prefill]]\nhealth_port = {probed}\n"))
    first, second = tmp_path / "a.out", tmp_path / "b.out"
    front = start(topology, first, "--node", "a")
    worker = None
    try:
        until(lambda: "prefill-0     joined" in first.read_text(), "join on node a", first)
        with grpc.insecure_channel(f"127.0.0.1:{probed}") as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert " ready " not in first.read_text()
        worker = start(topology, second, "--node", "b")
        until(lambda: " ready " in first.read_text() and " ready " in second.read_text(), "cluster", first, second)
        assert ask(topology).json()["usage"]["completion_tokens"] == 4
        assert "decode-0      joined   on 127.0.0.2" in first.read_text()
        front.send_signal(signal.SIGTERM)
        assert (front.wait(40), worker.wait(40)) == (0, 0)
        assert "the coordinator has drained every worker of this host" in second.read_text()
    finally:
        for process in filter(None, (front, worker)):
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.wait(20)


@pytest.mark.long  # test_emit.py starts such a topology, by scripts; test_doctor.py, on one host
def test_up_on_a_host_with_every_address_of_the_topology_starts_all_nodes(tmp_path: Path) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"), tensor_parallel=2)
    out = tmp_path / "up.out"
    process = start(topology, out)
    try:
        until(lambda: " ready " in out.read_text(), "cluster", out)
        assert ask(topology).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0, out.read_text()


@pytest.mark.long  # test_start.py has the same without a topology
def test_the_failure_of_a_rank_is_reported_in_the_last_lines_of_the_output(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    (model / "model.safetensors").write_bytes(b"no safetensors")  # only detected by the process that loads it
    topology, out = loopback_topology(tmp_path / "t.toml", model, tensor_parallel=2), tmp_path / "up.out"
    assert start(topology, out).wait(60) == 3
    lines = out.read_text().strip().splitlines()
    shown = find_box(lines)
    assert shown[-1] == lines[-1] and "model.safetensors" in " ".join(shown)


@pytest.mark.parametrize("flag", ["--prefill=2", "--model=x", "--port=1"])
def test_options_set_by_the_topology_file_are_refused_on_the_command_line(flag: str, tmp_path: Path) -> None:
    topology, out = loopback_topology(tmp_path / "t.toml", "builtin"), tmp_path / "up.out"
    assert start(topology, out, flag).wait(60) == 3
    assert f"error: {flag.partition('=')[0]} cannot be combined with --topology" in out.read_text()
