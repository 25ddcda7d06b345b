"""`baton doctor` with real probes: a healthy cluster, and pairs that cannot reach each other."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from baton.core.errors import StartupError
from baton.runtime.options import read_config_file
from launch.doctor.board import Board, BoardClient
from launch.doctor.findings import compare, on_node, print_verdict, read_results
from launch.doctor.run import doctor
from launch.doctor.tasks import STEPS, Task, make_tasks, plan_digest, task_from_json
from launch.plan import Plan, make_plan
from launch.topology import parse_topology
from launch.up_config import DoctorConfig
from tests.support import netns
from tests.support.checkpoints import make_checkpoint
from tests.support.topologies import free_ports, loopback_topology

DOCTOR = (sys.executable, "-m", "launch.cli", "doctor")


def plan_of(topology: Path) -> Plan:
    return make_plan(parse_topology(read_config_file(str(topology))), "m", "m")


def run(*words: object) -> tuple[int, str]:
    done = subprocess.run([*DOCTOR, *map(str, words)], capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout + done.stderr


def test_tasks_cover_every_rank_and_both_ends_of_every_edge(tmp_path: Path) -> None:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "m", tensor_parallel=4))
    tasks = make_tasks(plan, (2, 2), 10.0)
    assert {name: [task.me.key for task in found] for name, found in tasks.items()} == {
        "a": ["prefill-0.0", "prefill-0.1"],
        "b": ["prefill-0.2", "prefill-0.3", "decode-0.0"],
    }
    everyone = [task for found in tasks.values() for task in found]
    senders = {(task.me.key, peer.key) for task in everyone if task.role == "prefill" for peer in task.peers}
    takers = {(peer.key, task.me.key) for task in everyone if task.role == "decode" for peer in task.peers}
    assert senders == takers == {("prefill-0.0", "decode-0.0"), ("prefill-0.2", "decode-0.0")}  # a replica of each head
    everything = make_tasks(plan, (), 10.0)["b"][-1]
    assert len(everything.peers) == 4
    assert all(task_from_json(json.loads(json.dumps(asdict(task)))) == task for task in everyone)


def test_different_plans_have_different_digests(tmp_path: Path) -> None:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "m"))
    assert plan_digest(plan) == plan_digest(plan_of(tmp_path / "t.toml")) != plan_digest(replace(plan, model="n"))


def test_client_with_another_digest_can_neither_read_nor_write_the_board() -> None:
    with contextlib.closing(Board("127.0.0.1", 0, "mine")) as board:
        friend, stranger = (BoardClient(*board.address, digest) for digest in ("mine", "other"))
        friend.put("x", {"a": 1})
        assert friend.get("x") == {"a": 1} and friend.get("y") is None
        for call in (lambda: stranger.get("x"), lambda: stranger.put("x", 2)):
            with pytest.raises(PermissionError, match="different topology"):
                call()
        assert board.values == {"x": {"a": 1}} and board.mismatched_hosts == {"127.0.0.1"}
        with pytest.raises(StartupError, match="cannot listen"):
            Board("127.0.0.1", board.address[1], "mine")


def test_version_differences_are_reported_with_their_node() -> None:
    facts = {"a": {"torch": "2", "model digest": "x"}, "b": {"torch": "1", "model digest": "x"}}
    assert compare(facts) == [on_node("versions", "a"), on_node("versions", "b", "torch is 1, but 2 on node a")]


def results(tmp_path: Path) -> tuple[dict[str, object], list[Task]]:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "m", tensor_parallel=2))
    tasks = [task for found in make_tasks(plan, (), 10.0).values() for task in found]
    values: dict[str, object] = {f"here/{task.me.key}": {} for task in tasks}
    return values | {name: {"seconds": 0.01} for t in tasks for step in STEPS for name in t.expected(step)}, tasks


def test_failed_pair_is_reported_with_a_hint(tmp_path: Path) -> None:
    values, tasks = results(tmp_path)
    assert not any(found.error for found in read_results(values, tasks, 10.0))
    values["edge/prefill-0.1/decode-0.0"] = {"error": "no answer"}
    values["end/decode-0.0/prefill-0.1"] = {"error": "nobody came"}
    verdict = read_results(values, tasks, 10.0)
    (failed,) = (found for found in verdict if found.error)
    assert failed.where == "prefill-0 rank 1 (127.0.0.2) → decode-0 rank 0 (127.0.0.2)"
    assert failed.error == "no answer; at the other end: nobody came"
    out = io.StringIO()
    assert print_verdict(verdict, Console(file=out, width=150)) == 1
    assert "1 of 7 checks failed" in out.getvalue() and "check: edges need" in out.getvalue()


def test_probe_that_never_started_is_reported(tmp_path: Path) -> None:
    values, tasks = results(tmp_path)
    for name in ("here/decode-0.0", "edge/prefill-0.0/decode-0.0", "edge/prefill-0.1/decode-0.0"):
        del values[name]
    errors = {found.error for found in read_results(values, tasks, 10.0) if found.error}
    assert errors == {"no probe connected for decode-0 rank 0 (127.0.0.2)"}


def test_missing_result_is_attributed_to_the_exited_probe_and_not_to_the_network(tmp_path: Path) -> None:
    values, tasks = results(tmp_path)
    del values["rendezvous/prefill-0.0"]
    values["exited/prefill-0.1"] = "ended with exit code 1: x"
    (failed,) = (found for found in read_results(values, tasks, 10.0) if found.error)
    assert failed.error == "the probe of prefill-0 rank 1 (127.0.0.2) ended with exit code 1: x" and failed.untried


@pytest.mark.parametrize(
    ("name", "exited"),
    [
        ("rendezvous/prefill-0.0", "prefill-0.1"),
        ("all-reduce/prefill-0.0", "prefill-0.1"),
        ("link/prefill-0.0/decode-0.0", "decode-0.0"),
        ("edge/prefill-0.0/decode-0.0", "decode-0.0"),
    ],
)
def test_measured_error_is_reported_even_if_the_other_probe_exited(name: str, exited: str, tmp_path: Path) -> None:
    values, tasks = results(tmp_path)
    values[name] = {"error": "cannot reach 127.0.0.2: No route to host"}
    values[f"exited/{exited}"] = "exited (killed)"
    verdict = read_results(values, tasks, 10.0)
    (failed,) = (found for found in verdict if found.error)
    other = f"{exited.replace('.', ' rank ')} (127.0.0.2)"
    assert failed.error == f"cannot reach 127.0.0.2: No route to host; the probe of {other} exited (killed)"
    assert not failed.untried
    out = io.StringIO()
    print_verdict(verdict, Console(file=out, width=150))
    assert "firewall" in out.getvalue() and "the network between these ranks was not tested" not in out.getvalue()


def test_error_measured_at_the_other_end_is_reported_even_if_its_probe_exited(tmp_path: Path) -> None:
    values, tasks = results(tmp_path)
    values["end/decode-0.0/prefill-0.1"] = {"error": "the bytes received differ from those sent"}
    values["exited/decode-0.0"] = "exited (killed)"
    (failed,) = (found for found in read_results(values, tasks, 10.0) if found.error)
    assert failed.error.startswith("at the other end: the bytes received differ from those sent; the probe of ")
    assert failed.seconds and not failed.untried


def test_exited_probe_ends_the_wait_and_is_not_reported_as_a_firewall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "absent", tensor_parallel=2))
    began = time.monotonic()
    config = DoctorConfig(limit_s=1, wait_s=100)
    probe = ("/bin/sh", "-c", "echo noise; echo no such library >&2; exit 7")
    assert doctor(plan, frozenset({"a", "b"}), config, probe) == 1
    assert time.monotonic() - began < config.wait_s  # it did not wait for a probe that has ended
    shown, why = capsys.readouterr().out, "exited (exit code 7): no such library"
    assert f"the probe of prefill-0 rank 1 (127.0.0.2) {why}" in shown
    assert f"the probe of decode-0 rank 0 (127.0.0.2) {why}" in shown
    assert "firewall" not in shown and "the network between these ranks was not tested" in shown


def test_port_in_use_is_reported_as_a_running_cluster_with_the_other_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "absent"))
    with socket.create_server(("127.0.0.1", plan.topology.coordinator.config.control_port)):
        assert doctor(plan, frozenset({"a", "b"}), DoctorConfig(limit_s=1, wait_s=1)) == 1
    shown = capsys.readouterr().out
    assert f"a cluster may be running there, see `baton ps {plan.url}`" in shown
    assert "cores" in shown and "model directory m does not exist" in shown


@pytest.mark.cluster
def test_a_healthy_cluster_passes(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    code, text = run("--topology", loopback_topology(tmp_path / "t.toml", model, tensor_parallel=2))
    assert code == 0, text
    lines = [line.split() for line in text.splitlines()]
    assert sum(words[:1] == ["rendezvous"] for words in lines) == 2
    assert sum(words[:1] == ["all-reduce"] and "MB/s" in words for words in lines) == 2
    edges = [words for words in lines if words[:1] == ["edge"]]
    assert len(edges) == 2 and all("ok" in words and "MB/s" in words and "ms" in words for words in edges)
    assert "checks passed" in text


@pytest.mark.cluster
def test_port_in_use_is_reported_with_its_node(tmp_path: Path) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"))
    port = plan_of(topology).topology.workers[1].config.store_port
    with socket.create_server(("127.0.0.2", port)):
        code, text = run("--topology", topology, "--limit-s", "4")
    assert code == 1
    assert f"node b: port {port} on 127.0.0.2 is in use; choose another with --store-port of decode-0" in text
    assert "decode-0 cannot open its ports" in text


def test_node_without_a_doctor_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"))
    monkeypatch.setattr("launch.doctor.run._GRACE_S", 0.0)
    config = DoctorConfig(limit_s=1, wait_s=2)
    assert doctor(plan_of(topology), frozenset({"a"}), config, ("/bin/sh", "-c", "sleep 60")) == 1
    text = capsys.readouterr().out
    assert "node b: no doctor reported within 2 s" in text
    assert "no probe connected for prefill-0 rank 0 (127.0.0.1), decode-0 rank 0 (127.0.0.2)" in text
    code, text = run("--topology", topology, "--node", "b", "--wait-s", "1", "--limit-s", "2")
    assert code == 3 and "node b cannot reach the doctor of node a at 127.0.0.1" in text


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason := netns.missing()), reason=reason or "never")
def test_pair_with_dropped_packets_is_reported_within_the_time_limit(tmp_path: Path) -> None:
    """b reaches a, a reaches c, and packets from b to c are dropped, as by a firewall."""
    model, (port, link, store) = make_checkpoint(tmp_path / "m", "llama"), free_ports(3)
    token = tmp_path / "token"
    token.write_text("x" * 64)
    token.chmod(0o600)
    topology = tmp_path / "t.toml"
    with netns.nodes("a", "b", "c") as network:
        places = "".join(f'[[nodes]]\nname = "{name}"\naddress = "{network[name].address}"\n' for name in "abc")
        topology.write_text(
            f'model = "{model}"\n[options]\ndevice = "cpu"\ncluster_token_file = "{token}"\n{places}'
            f'[coordinator]\nnode = "a"\ncontrol_port = {port}\n[[prefill]]\nnode = "b"\n[[decode]]\nnode = "c"\n'
            f"link_port = {link}\nstore_port = {store}\n"
        )
        lost = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        replace_neighbour = ["ip", "neigh", "replace", network["c"].address, *lost]
        assert network["b"].start(replace_neighbour).wait(10) == 0
        began = time.monotonic()
        command = [*DOCTOR, "--topology", str(topology), "--limit-s", "5"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        doctors = [node.start(command, **options) for node in network.values()]
        texts = [str(doctor.communicate(timeout=90)[0]) for doctor in doctors]
        b, c = (network[name].address for name in "bc")
    assert [doctor.returncode for doctor in doctors] == [1, 1, 1], texts
    assert time.monotonic() - began < 80
    for text in texts:
        assert f"edge prefill-0 rank 0 ({b}) → decode-0 rank 0 ({c}): " in text, text
        assert f"{c}:{store}" in text and f"{c}:{link}" in text and "firewall" in text
        assert "2 of " in text  # the link and the edge, and nothing else
