"""`baton doctor` with real workers: a healthy cluster, and workers that fail or cannot reach each other."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from baton.core.codes import ErrorCode
from baton.core.commands import Drain, Prefill, Welcome
from baton.core.errors import HandoffError, JoinRefused, StartupError
from baton.core.events import HandedOver, Parked, SequenceEnded, StageStamps, StepEvents
from baton.core.handover import verify
from baton.runtime.options import read_config_file
from coordinator.policy.pool import Pool, Worker
from launch.cli import baton
from launch.doctor.findings import Finding, print_verdict
from launch.doctor.run import doctor
from launch.doctor.sessions import CHECK_BYTES, CheckSessions, MeasuredHandOver, check_prompt
from launch.members import Programs
from launch.plan import Plan, make_plan
from launch.topology import parse_topology
from launch.up_config import DoctorConfig
from tests.support import forks, netns
from tests.support.builders import make_join, make_layout
from tests.support.checkpoints import make_checkpoint
from tests.support.fake_workers import bench
from tests.support.topologies import free_ports, loopback_topology

DOCTOR = (sys.executable, "-m", "launch.cli", "doctor")


def plan_of(topology: Path) -> Plan:
    return make_plan(parse_topology(read_config_file(str(topology))), "m", "m")


def run(*words: object) -> tuple[int, str]:
    """With exec: a doctor on the coordinator's node has threads when it starts the workers, and cannot be forked."""
    done = subprocess.run([*DOCTOR, *map(str, words)], capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout + done.stderr


class Sessions:
    """A check with a prefill and a decode worker that a test plays."""

    def __init__(self) -> None:
        self.sessions = CheckSessions(("p0", "d0"), None, "")
        self.joins = {name: replace(make_join(name, blocks=64), max_running=4) for name in ("p0", "d0")}
        self.queues = {name: self.sessions.join(join, "peer") for name, join in self.joins.items()}
        self.key = b""

    async def command(self, name: str, kind: type) -> Any:
        while not isinstance(message := await asyncio.wait_for(self.queues[name].get(), 5.0), kind):
            pass
        return message

    def report(self, name: str, **events: Any) -> None:
        assert self.sessions.on_message(name, 1, StepEvents(**{k: (v,) for k, v in events.items()}))


@asynccontextmanager
async def handing_over(limit_s: float = 5.0) -> AsyncIterator[tuple[Sessions, Prefill, asyncio.Task[MeasuredHandOver]]]:
    check = Sessions()
    check.key = (await check.command("p0", Welcome)).handle_key
    task = asyncio.create_task(check.sessions.hand_over("p0", "d0", limit_s))
    yield check, await check.command("p0", Prefill), task
    assert not check.sessions._tries and not task.cancel()


@pytest.mark.parametrize("order", [("sent", "decoded"), ("decoded", "sent")])
async def test_hand_over_has_succeeded_when_both_workers_have_reported_it(order: tuple[str, str]) -> None:
    async with handing_over() as (check, command, task):
        name, (target,) = command.request.sequence_id, command.targets
        ends = {"source": "p0", "source_incarnation": 1, "destination": "d0", "incarnation": 1}
        verify(check.key, target.handle, sequence=name, now_ms=0.0, **ends)
        assert command.request.max_tokens == 2 and target.link_address == check.joins["d0"].link_address
        for part in order:
            assert not task.done()
            if part == "sent":
                check.report("p0", handed_over=HandedOver(name, "d0", 512, StageStamps(transfer_s=0.5)))
            else:
                check.report("d0", ended=SequenceEnded(name, "length"))
            await asyncio.sleep(0)
        assert await task == MeasuredHandOver(512, 0.5)


@pytest.mark.parametrize(
    ("worker", "kind", "reason"),
    [
        ("p0", "parked", "p0: no answer"),
        ("p0", "ended", "p0: no answer"),
        ("d0", "ended", "d0: no answer"),
        ("p0", "length", "p0: length"),  # it never reached decode
        ("d0", "session", "the session of d0 ended: killed"),
        ("d0", "nothing", "no result within 0.2 s"),
    ],
)
async def test_failed_hand_over_has_the_reason_of_the_worker_that_reported_it(
    worker: str, kind: str, reason: str
) -> None:
    async with handing_over(0.2 if kind == "nothing" else 5.0) as (check, command, task):
        name = command.request.sequence_id
        match kind:
            case "parked":
                check.report(worker, parked=Parked(name, "no answer"))
            case "ended":
                check.report(worker, ended=SequenceEnded(name, "error", ErrorCode.INTERNAL_ERROR, "no answer"))
            case "length":
                check.report(worker, ended=SequenceEnded(name, "length"))
            case "session":
                check.sessions.session_ended(worker, 1, check.queues[worker], "killed")
        with pytest.raises(HandoffError) as caught:
            await task
        assert caught.value.message == reason


def test_worker_that_does_not_fit_or_is_not_in_the_plan_is_refused_with_the_reason() -> None:
    sessions = CheckSessions(("p0", "d0"), None, "")
    sessions.join(make_join("p0"), "peer")
    for join, reason in (
        (make_join("d0", quantize="int8"), "quantize: 'none' at p0 and 'int8' at d0"),
        (make_join("d1"), "worker_id: 'd1' is not in this plan"),
    ):
        with pytest.raises(JoinRefused, match=reason):
            sessions.join(join, "peer")
        assert reason in sessions.refusals[join.worker_id]
    with pytest.raises(JoinRefused, match="token: it is missing"):
        CheckSessions(("p0",), None, "secret").join(make_join("p0"), "peer")


async def test_workers_leave_at_the_end_but_those_of_a_failed_hand_over_are_refused_with_it() -> None:
    check = Sessions()
    sessions, failed = check.sessions, {"p0": "p0 → d0: no answer"}
    ending = asyncio.create_task(sessions.end(failed, 5.0))
    await check.command("d0", Drain)
    assert not sessions.is_current("p0", check.queues["p0"]) and not ending.done()
    with pytest.raises(JoinRefused, match="hand-over: p0 → d0: no answer"):
        sessions.join(check.joins["p0"], "peer")
    await asyncio.wait_for(ending, 4.0)


@pytest.mark.parametrize(("blocks", "tokens"), [(1 << 20, 8192), (8, 8 * 4 - 1), (1, 3)])
def test_prompt_has_enough_kv_but_fits(blocks: int, tokens: int) -> None:
    """1 KiB of KV per token."""
    layout = make_layout(4, layers=4, heads=4, head_dim=8)
    assert layout.bytes_per_token * 8192 == CHECK_BYTES
    p, d = (make_join(n, blocks=b, layout=layout, max_model_len=1 << 20) for n, b in (("p0", 1 << 20), ("d0", blocks)))
    workers = [Worker(join, 0.0, 1.0, Pool(join.role)) for join in (p, d)]
    prompt = check_prompt(*workers)
    assert len(prompt) == tokens and set(prompt) <= set(range(p.facts.vocab_size))


def test_verdict_names_each_failure_with_what_to_check() -> None:
    out, console = io.StringIO(), Console
    pair = Finding("hand-over", "p0 (a) → d0 (b)", "p0: no reply from b:9101")
    assert print_verdict([Finding("join", "p0", seconds=1.0), pair], console(file=out, width=150)) == 1
    assert "hand-over p0 (a) → d0 (b): p0: no reply from b:9101\n  check: between both nodes" in out.getvalue()
    assert out.getvalue().endswith("1 of 2 checks failed\n")
    assert print_verdict([Finding("join", "p0")], console(file=out, width=150)) == 0


def test_worker_that_ended_is_reported_with_its_own_line_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "absent"))
    config = DoctorConfig(wait_s=100, run_dir=str(tmp_path / "run"))
    programs = Programs(agent=(), worker=("/bin/sh", "-c", "echo noise; echo no such library >&2; exit 7"))
    began = time.monotonic()
    assert doctor(plan, frozenset({"a", "b"}), config, programs) == 1
    assert time.monotonic() - began < config.wait_s
    shown = capsys.readouterr().out
    for name in ("prefill-0", "decode-0"):
        assert f"join {name}: exit code 7: no such library" in shown
    assert "hand-over" not in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--autoscale", "/nowhere.json"), "--autoscale /nowhere.json: No such file"),
        (("--autoscale-min", "0"), "--autoscale-min has no effect without --autoscale"),
    ],
)
def test_options_of_the_autoscaler_are_checked_as_by_up(
    options: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")  # which the command sets
    monkeypatch.setattr("launch.doctor.run.doctor", lambda *_: 0)
    words = ["doctor", "--model", "builtin", "--device", "cpu", "--kv-memory-gib", "0.1", *options]
    with pytest.raises(StartupError, match=reason):
        CliRunner().invoke(baton, words, standalone_mode=False, catch_exceptions=False)


def test_port_in_use_is_reported_as_a_running_cluster_with_the_other_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(loopback_topology(tmp_path / "t.toml", "absent"))
    config = DoctorConfig(run_dir=str(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", plan.topology.coordinator.config.control_port)):
        assert doctor(plan, frozenset({"a", "b"}), config) == 1
    shown = capsys.readouterr().out
    assert f"a cluster may be running there, see `baton ps {plan.url}`" in shown
    assert "cores" in shown and "model directory m does not exist" in shown and "join" not in shown


@pytest.mark.cluster
def test_a_healthy_cluster_passes(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    topology = loopback_topology(tmp_path / "t.toml", model, tensor_parallel=2)
    code, text = run("--topology", topology, "--run-dir", tmp_path / "run")
    assert code == 0, text
    lines = [line.split() for line in text.splitlines()]
    joins = [words for words in lines if words[:1] == ["join"]]
    assert [words[:3] for words in joins] == [["join", "prefill-0", "ok"], ["join", "decode-0", "ok"]]
    (pair,) = (words for words in lines if words[:1] == ["hand-over"])
    assert "ok" in pair and "MB" in pair
    assert "checks passed" in text
    log = (tmp_path / "run" / "decode-0.log").read_text()
    assert "drained" in log and "error" not in log.lower()


@pytest.mark.cluster
@pytest.mark.long  # above, the port of the coordinator
def test_port_in_use_is_reported_with_its_node(tmp_path: Path) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"))
    port = plan_of(topology).topology.workers[1].config.store_port
    with socket.create_server(("127.0.0.2", port)):
        code, text = run("--topology", topology, "--run-dir", tmp_path / "run")
    assert code == 1
    assert f"node b: port {port} on 127.0.0.2 is in use; choose another with --store-port of decode-0" in text
    assert "join decode-0: exit code 3: " in text


@pytest.mark.cluster
def test_node_without_a_doctor_is_reported(tmp_path: Path) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"))
    code, text = run("--topology", topology, "--node", "a", "--wait-s", "1", "--run-dir", tmp_path / "a")
    assert code == 1 and "join decode-0: it has not joined within 1 s; is `baton doctor` running on b?" in text


@pytest.mark.cluster
async def test_worker_with_check_joins_and_leaves(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")

    async def check(port: int, *more: str) -> tuple[int, str]:
        words = ["-m", "prefill", "--check", "--model", str(model), "--coordinator", f"127.0.0.1:{port}", *more]
        done = await asyncio.to_thread(forks.run, [sys.executable, *words, "--worker-id", "p0"], timeout=110)
        return done.returncode, done.stdout + done.stderr

    async with bench() as b:
        code, log = await check(b.port)
        assert code == 0 and "check passed: " in log, log
        assert b.cluster.workers.present() == [] and b.cluster.joins_refused == {}
        await b.add("d0", quantize="int8")
        code, log = await check(b.port)
        assert code == 3 and "error: p0: the coordinator refused this worker: " in log, log


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
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*DOCTOR, "--topology", str(topology), "--run-dir"]
        doctors = [
            node.start([*command, str(tmp_path / node.name)], forked=True, **options) for node in network.values()
        ]
        first, *others = [str(doctor.communicate(timeout=90)[0]) for doctor in doctors]
        b, c = (network[name].address for name in "bc")
    assert [doctor.returncode for doctor in doctors] == [1, 1, 1], [first, *others]
    assert time.monotonic() - began < 80
    assert f"hand-over prefill-0 ({b}) → decode-0 ({c}): prefill-0: decode-0: " in first, first
    assert f"{c}:{link}" in first and "firewall" in first and "1 of " in first
    for name, text in zip(("prefill-0", "decode-0"), others, strict=True):
        refused = f"the coordinator refused this worker: hand-over: prefill-0 ({b}) → decode-0 ({c}): "
        assert f"join {name}: exit code 3: " in text and refused in text, text
        assert f"{c}:{link}" in text and "1 of " in text
