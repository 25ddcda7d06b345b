"""`baton doctor`: checks, on every node, what a cluster needs before it is started.

On each node it checks what the node provides (`findings`) and starts one probe (`probe`) for each rank that the plan
places there. The doctor on the coordinator's node hosts the board, opens one step after the other, collects the results
that the probes put there, and prints the verdict; the doctors of other nodes wait for it and print the same.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from baton.core.errors import StartupError
from baton.runtime.model_source import resolve_model
from launch.child import Child, ChildSpec
from launch.doctor.board import Board, BoardClient
from launch.doctor.findings import Finding, check_node, compare, on_node, print_verdict, read_results
from launch.doctor.tasks import STEPS, Task, exited_key, make_tasks, plan_digest
from launch.failure import describe_exit
from launch.plan import Plan
from launch.up_config import DoctorConfig

PROBE = (sys.executable, "-m", "launch.doctor.probe")
_GRACE_S = 3.0
_POLL_S = 0.05
_REPORT_EVERY_S = 0.5

_Local = Mapping[str, tuple[list[Finding], dict[str, str]]]


def doctor(plan: Plan, nodes: frozenset[str], config: DoctorConfig, probe: tuple[str, ...] = PROBE) -> int:
    """Runs this host's part; returns 0 when all checks passed on all nodes, else 1. `config` has the limits.

    Raises:
        StartupError: the doctor on the coordinator's node cannot be reached, or sends no verdict.
    """
    local = {name: check_node(plan, name, config.full_digest) for name in sorted(nodes)}
    tasks = make_tasks(plan, _heads(plan), config.limit_s)
    front, port, digest = plan.topology.front, plan.topology.coordinator.config.control_port, plan_digest(plan)
    with ExitStack() as stack:
        board = None
        if front.name in nodes:
            try:
                board = Board(front.address, port, digest)
            except StartupError as error:
                return print_verdict(_without_board(front.name, error.message, plan.url, local))
            stack.callback(board.close)
            port = board.address[1]
        client = BoardClient(front.address, port, digest)
        _put_findings(client, local, plan, config.wait_s)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-doctor-")))
        probes: dict[str, Child] = {}  # probes of this host whose exit is not reported yet
        for task in (task for name in sorted(nodes) for task in tasks[name]):
            key, path = task.me.key, directory / f"{task.me.key}.json"
            path.write_text(json.dumps({"task": asdict(task), "board": (front.address, port, digest)}))
            probes[key] = Child(ChildSpec(key, (*probe, str(path)), directory / f"{key}.log"))
            stack.callback(probes[key].kill)
        if board is not None:
            verdict = _collect(board, plan, tasks, config, probes)
            board.values["report"] = [asdict(finding) for finding in verdict]
            time.sleep(_GRACE_S if set(tasks) - nodes else 0)  # lets the doctors of other nodes read it
        else:
            report, deadline = None, time.monotonic() + config.wait_s + sum(_step_s(tasks, step) for step in STEPS)
            while report is None and time.monotonic() < deadline:
                with suppress(OSError):  # no reply: retried
                    _report_exited(probes, client.put)
                report = client.wait("report", _REPORT_EVERY_S)
            if report is None:
                raise StartupError(f"the doctor of node {front.name} at {front.address}:{port} sent no verdict")
            verdict = [Finding(**finding) for finding in report]
    return print_verdict(verdict)


def _report_exited(probes: dict[str, Child], put: Callable[[str, str], object]) -> None:
    """Reports why each newly exited probe ended, and drops it; one whose `put` raises is reported at the next call."""
    for key, child in list(probes.items()):
        if (code := child.poll()) is not None:
            last = next((line.strip() for line in reversed(child.tail()) if line.strip()), "")
            put(exited_key(key), f"exited ({describe_exit(code)}){f': {last}' if last else '; no output'}")
            del probes[key]


def _put_findings(client: BoardClient, local: _Local, plan: Plan, wait_s: float) -> None:
    """Puts this host's findings on the board, which may not be open yet.

    Raises:
        StartupError: no doctor hosts the board, or one with another topology does.
    """
    front, port = plan.topology.front, plan.topology.coordinator.config.control_port
    deadline = time.monotonic() + wait_s
    for name, (findings, facts) in local.items():
        while True:
            try:
                client.put(f"node/{name}", {"findings": [asdict(f) for f in findings], "facts": facts})
                break
            except PermissionError as error:
                raise StartupError(f"node {name}: {error}; give every node the same file") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    what = f"node {name} cannot reach the doctor of node {front.name} at {front.address}:{port}"
                    check = "is it running there, does a firewall drop the port, is the address on the right interface?"
                    raise StartupError(f"{what}: {error.strerror or error}; {check}") from None
                time.sleep(_POLL_S)


def _collect(
    board: Board, plan: Plan, tasks: dict[str, list[Task]], config: DoctorConfig, probes: dict[str, Child]
) -> list[Finding]:
    """Opens the steps one by one and waits for the results of each, up to its time limit."""
    everyone = [task for of_node in tasks.values() for task in of_node]
    awaited = [(f"here/{task.me.key}", task.me.key) for task in everyone] + [(f"node/{name}", "") for name in tasks]
    _wait_for(board, awaited, config.wait_s, probes)
    for step in STEPS:
        board.values[f"step/{step}"] = True
        awaited = [(name, task.me.key) for task in everyone for name in task.expected(step)]
        _wait_for(board, awaited, _step_s(tasks, step), probes)
    nodes = {name: board.values[f"node/{name}"] for name in tasks if f"node/{name}" in board.values}
    findings = [Finding(**finding) for node in nodes.values() for finding in node["findings"]]
    for name in tasks:
        if name not in nodes and (tasks[name] or name == plan.topology.front.name):
            what = f"no doctor reported within {config.wait_s:g} s; run `baton doctor --topology FILE` there too"
            findings.append(on_node("doctor", name, what))
    findings += compare({name: node["facts"] for name, node in nodes.items() if tasks[name]})
    for stranger in sorted(board.mismatched_hosts):
        findings.append(on_node("doctor", stranger, "it has a different topology file than the coordinator's node"))
    return findings + read_results(dict(board.values), everyone, config.limit_s)


def _wait_for(board: Board, awaited: Sequence[tuple[str, str]], timeout_s: float, probes: dict[str, Child]) -> None:
    """Waits until every name is on the board, except those of a probe (the second of each pair) that has exited."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        _report_exited(probes, board.values.__setitem__)
        if all(name in board.values or exited_key(probe) in board.values for name, probe in awaited):
            return
        time.sleep(_POLL_S)


def _step_s(tasks: Mapping[str, Iterable[Task]], step: str) -> float:
    """Returns how long a step may take on all nodes."""
    return max((task.step_s(step) for of_node in tasks.values() for task in of_node), default=0.0) + _GRACE_S


def _without_board(node: str, error: str, url: str, local: _Local) -> list[Finding]:
    """Returns the findings on this host, and why nothing was tried between ranks."""
    if os.strerror(errno.EADDRINUSE) in error:
        error += f"; a cluster may be running there, see `baton ps {url}`: run the doctor before starting one"
    return [*(found for findings, _ in local.values() for found in findings), on_node("doctor", node, error)]


def _heads(plan: Plan) -> tuple[int, ...]:
    """Returns the KV heads of each layer; empty when the model cannot be read here: `check_node` reports why."""
    from baton.engine.checkpoint import read_model_config

    try:
        config = read_model_config(resolve_model(plan.model))
    except (StartupError, OSError):
        return ()
    return (config.num_kv_heads,) * config.num_layers
