"""`baton doctor`: tries, on every node, what a cluster will need before it is started.

On each node it checks what the node has (`node_checks`) and starts one probe (`probe`) for each rank that the plan puts
there. The doctor on the coordinator's node hosts the board, opens step after step, collects the results that the probes
leave there, and prints the verdict; the doctors of other nodes wait for it and print the same.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.core.errors import StartupError
from baton.model_source import resolve_model
from launch.doctor.board import Board, BoardClient
from launch.doctor.local_probes import PROBE, LocalProbes
from launch.doctor.node_checks import Finding, check_node, compare
from launch.doctor.report import Verdict, print_verdict, read_results
from launch.doctor.tasks import STEPS, Task, exited_key, make_tasks, plan_digest
from launch.plan import Plan

LIMIT_S = 10.0
WAIT_S = 60.0
_GRACE_S = 3.0
_POLL_S = 0.05
_REPORT_EVERY_S = 0.5

_Local = Mapping[str, tuple[list[Finding], dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Settings:
    """`limit_s` bounds each step of each probe; `wait_s` how long the doctors of other nodes, and probes, may take to
    come; `full_digest` reads every byte of the model."""

    limit_s: float = LIMIT_S
    wait_s: float = WAIT_S
    full_digest: bool = False
    probe: tuple[str, ...] = PROBE


def doctor(plan: Plan, nodes: frozenset[str], settings: Settings) -> int:
    """Runs this host's part; returns 0 when all is well everywhere, else 1.

    Raises:
        StartupError: the doctor on the coordinator's node cannot be reached.
    """
    local = {name: check_node(plan, name, settings.full_digest) for name in sorted(nodes)}
    tasks = make_tasks(plan, _heads(plan), settings.limit_s)
    place = plan.topology.coordinator
    host, port, digest = plan.topology.node(place.node).address, place.control_port, plan_digest(plan)
    with ExitStack() as stack:
        board = None
        if place.node in nodes:
            try:
                board = stack.enter_context(Board(host, port, digest))
            except StartupError as error:
                print_verdict(Verdict(tuple(_without_board(place.node, error.message, plan.url, local)), ()))
                return 1
            port = board.address[1]
        client = BoardClient(host, port, digest)
        _put_findings(client, local, plan, settings)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-doctor-")))
        mine = [task for name in sorted(nodes) for task in tasks[name]]
        probes = LocalProbes(mine, (host, port, digest), directory, settings.limit_s, settings.probe)
        stack.callback(probes.close)
        if board is not None:
            verdict = _collect(board, plan, tasks, settings, probes)
            board.values["report"] = verdict.as_json()
            time.sleep(_GRACE_S if set(tasks) - nodes else 0)  # the doctors of other nodes read it
        else:
            report, deadline = None, time.monotonic() + settings.wait_s + _longest_s(tasks, settings)
            while report is None and time.monotonic() < deadline:
                with suppress(OSError):  # not answered: asked again
                    probes.report_exited(client.put)
                report = client.wait("report", _REPORT_EVERY_S)
            if report is None:
                raise StartupError(f"the doctor of node {place.node} at {host}:{port} gave no verdict")
            verdict = Verdict.from_json(report)
    print_verdict(verdict)
    return 0 if verdict.ok else 1


def _put_findings(client: BoardClient, local: _Local, plan: Plan, settings: Settings) -> None:
    """Puts this host's findings on the board, which may not be there yet.

    Raises:
        StartupError: nobody hosts it, or somebody with another topology.
    """
    place = plan.topology.coordinator
    host = plan.topology.node(place.node).address
    deadline = time.monotonic() + settings.wait_s
    for name, (findings, facts) in local.items():
        while True:
            try:
                client.put(f"node/{name}", {"findings": [asdict(f) for f in findings], "facts": facts})
                break
            except PermissionError as error:
                raise StartupError(f"node {name}: {error}; give every node the same file") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    what = f"node {name} cannot reach the doctor of node {place.node} at {host}:{place.control_port}"
                    check = "is it running there, does a firewall drop the port, is the address the right interface's?"
                    raise StartupError(f"{what}: {error.strerror or error}; {check}") from None
                time.sleep(_POLL_S)


def _collect(
    board: Board, plan: Plan, tasks: dict[str, list[Task]], settings: Settings, probes: LocalProbes
) -> Verdict:
    """Opens the steps one by one and waits for the results of each, as long as they may take."""
    everyone = [task for of_node in tasks.values() for task in of_node]
    awaited = {f"here/{t.me.key}": t.me.key for t in everyone} | {f"node/{n}": "" for n in tasks}
    _wait_for(board, awaited, settings.wait_s, probes)
    for step in STEPS:
        board.values[f"step/{step}"] = True
        awaited = {name: task.me.key for task in everyone for name in task.expected(step)}
        _wait_for(board, awaited, _step_s(everyone, step, settings), probes)
    nodes = {name: board.values[f"node/{name}"] for name in tasks if f"node/{name}" in board.values}
    findings = [Finding(**finding) for node in nodes.values() for finding in node["findings"]]
    for name in tasks:
        if name not in nodes and (tasks[name] or name == plan.topology.coordinator.node):
            what = f"no doctor answered within {settings.wait_s:g} s; run `baton doctor --topology FILE` there too"
            findings.append(Finding("doctor", name, False, what))
    facts = {name: node["facts"] for name, node in nodes.items() if tasks[name]}
    findings += compare(facts, min(facts, default="")) if facts else []
    for stranger in sorted(board.strangers):
        findings.append(Finding("doctor", stranger, False, "the doctor there has another topology file"))
    return Verdict(tuple(findings), read_results(dict(board.values), everyone, settings.limit_s))


def _wait_for(board: Board, names: Mapping[str, str], timeout_s: float, probes: LocalProbes) -> None:
    """Until all `names` are on the board, but for those of a probe (its key is the value) that has exited."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        probes.report_exited(board.values.__setitem__)
        if all(name in board.values or exited_key(probe) in board.values for name, probe in names.items()):
            return
        time.sleep(_POLL_S)


def _without_board(node: str, error: str, url: str, local: _Local) -> list[Finding]:
    """The findings on this host all the same, and why nothing was tried between ranks."""
    if os.strerror(errno.EADDRINUSE) in error:
        error += f"; a cluster may be running there, see `baton ps {url}`: the doctor looks before one is started"
    return [*(found for findings, _ in local.values() for found in findings), Finding("doctor", node, False, error)]


def _step_s(tasks: Sequence[Task], step: str, settings: Settings) -> float:
    """How long a step may take: a probe tries its links one by one, and its edges too once they are connected."""
    links = max((len(task.links) for task in tasks), default=0)
    edges = max((len(task.peers) for task in tasks), default=0)
    times = {"link": links, "edges": 1 + edges}
    return settings.limit_s * times.get(step, 1) + _GRACE_S


def _longest_s(tasks: dict[str, list[Task]], settings: Settings) -> float:
    everyone = [task for of_node in tasks.values() for task in of_node]
    return sum(_step_s(everyone, step, settings) for step in STEPS)


def _heads(plan: Plan) -> tuple[int, ...]:
    """KV heads of each layer, or nothing when the model cannot be read here: `check_node` says why."""
    from baton.engine.checkpoint import read_model_config

    try:
        config = read_model_config(resolve_model(plan.model))
    except (StartupError, OSError):
        return ()
    return (config.num_kv_heads,) * config.num_layers
