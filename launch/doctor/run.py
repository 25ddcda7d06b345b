"""`baton doctor`: starts the workers of a plan as `baton up` would, lets each pair hand over one prompt, and ends them.

On each node it checks what the node provides (`findings`) and starts the plan's own commands. The doctor of the
coordinator's node takes the coordinator's place (`sessions`): it accepts the joins, checks every pair, and drains the
workers, which ends the doctors of the other nodes too. A worker that fails reports why itself, as in `baton up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from baton.core.errors import HandoffError, StartupError
from baton.core.names import host_port
from baton.runtime.model_source import resolve_model
from baton.runtime.tls import read_cluster_tls
from baton.runtime.token_file import read_token
from coordinator.control import serve_control
from coordinator.serving import read_own_model
from launch.child import Child
from launch.console import Console
from launch.doctor.findings import Finding, check_node, print_verdict
from launch.doctor.sessions import DRAIN_S, CheckSessions
from launch.failure import describe_exit
from launch.members import Addresses, Members, Programs
from launch.plan import Plan, without_batches
from launch.plan_checks import coordinator_options
from launch.run_directory import run_directory
from launch.up_config import DoctorConfig

POLL_S = 0.1
EXIT_S = 10.0
REMIND_S = 10.0


def doctor(plan: Plan, nodes: frozenset[str], config: DoctorConfig, programs: Programs | None = None) -> int:
    """Runs this host's part; returns 0 when all checks passed, else 1. `config` has the limits.

    Raises:
        StartupError: the run directory, or a log in it, cannot be written.
    """
    findings = [finding for name in sorted(nodes) for finding in check_node(plan, name)]
    with run_directory(config.run_dir) as run_dir:
        check = Check(plan, nodes, config, run_dir, programs or Programs())
        check.console.stage("logs", str(run_dir))
        findings += asyncio.run(check.run())
    return print_verdict(findings)


class Check:
    """The workers of this host while they are checked."""

    def __init__(
        self, plan: Plan, nodes: frozenset[str], config: DoctorConfig, run_dir: Path, programs: Programs
    ) -> None:
        self.console = Console()
        self._plan, self._config = plan, config
        self._members = Members(without_batches(plan), nodes, run_dir, programs, config.wait_s, DRAIN_S)
        # By part; a worker over several nodes has one on each.
        self._children: dict[str, Child] = {}
        # Why a part ended before it was drained.
        self._failed: dict[str, str] = {}
        # The hand-over that failed, by worker.
        self._unusable: dict[str, str] = {}

    async def run(self) -> list[Finding]:
        """Checks the workers; nothing is left running."""
        if not self._members.has_coordinator:
            return await self._follow()
        try:
            sessions = self._sessions()
            config, front = coordinator_options(self._plan), self._plan.topology.front
            tls = read_cluster_tls(config.cluster_tls_dir, "coordinator")
            server, port = await serve_control(sessions, front.address, config.control_port, tls)
        except StartupError as error:
            return [Finding("coordinator", f"node {self._plan.topology.front.name}", error.message)]
        try:
            self._start(Addresses("", "", host_port(front.address, port)))
            findings = await self._joined(sessions)
            findings += await self._hand_overs(sessions, {f.where for f in findings if not f.error})
            await sessions.end(self._unusable, EXIT_S)
            return findings + await self._exited()
        finally:
            self._kill()
            await server.stop(grace=0.2)

    def _sessions(self) -> CheckSessions:
        own = None
        with contextlib.suppress(StartupError, OSError):  # `check_node` and the workers of this node report it
            own = read_own_model(resolve_model(self._plan.model))
        workers = [worker.name for worker in self._plan.topology.workers]
        return CheckSessions(workers, own, read_token(coordinator_options(self._plan).cluster_token_file))

    def _start(self, bound: Addresses) -> None:
        for name in self._members.parts:
            try:
                self._children[name] = Child(spec := self._members.worker(name, bound))
                self.console.stage(name, f"starting   {spec.note}   log {spec.log}")
            except StartupError as error:
                self._failed[name] = error.message

    def _look(self) -> None:
        """Records why each part that has ended did."""
        for name, child in self._children.items():
            if name not in self._failed and (code := child.poll()):
                last = next((line.strip() for line in reversed(child.tail()) if line.strip()), "no output")
                self._failed[name] = f"{describe_exit(code)}: {child.reason or last}"

    def _failure(self, worker: str) -> str:
        """Returns why parts of a worker on this host ended; empty if they run."""
        parts = [name for name, part in self._members.parts.items() if part.worker.name == worker]
        return "; ".join(self._failed[name] for name in parts if name in self._failed)

    async def _joined(self, sessions: CheckSessions) -> list[Finding]:
        """Waits until each worker has joined, was refused, or has ended."""
        started, reminded = time.monotonic(), time.monotonic()
        findings: dict[str, Finding] = {}
        workers = [worker.name for worker in self._plan.topology.workers]
        while len(findings) < len(workers):
            self._look()
            seconds = time.monotonic() - started
            late = [name for name in workers if name not in findings]
            for name in late:
                if error := sessions.refusals.get(name) or self._failure(name):
                    findings[name] = Finding("join", name, error)
                elif name in sessions.connected:
                    findings[name] = Finding("join", name, seconds=seconds)
                    self.console.stage(name, "joined")
                elif seconds > self._config.wait_s:
                    findings[name] = Finding("join", name, self._late(name))
            if time.monotonic() - reminded > REMIND_S:
                reminded = time.monotonic()
                self.console.stage("waiting", f"for {', '.join(late)}; on another node `baton doctor` must run too")
            await asyncio.sleep(POLL_S)
        return [findings[name] for name in workers]

    def _late(self, worker: str) -> str:
        """Returns why a worker that has not joined may be late: the last line that it wrote here."""
        lines = [
            line.strip()
            for name, child in self._children.items()
            if self._members.parts[name].worker.name == worker
            for line in child.tail()
            if line.strip()
        ]
        elsewhere = f"is `baton doctor` running on {' and '.join(self._nodes(worker))}?"
        last = f"its last line: {lines[-1]}" if lines else elsewhere
        return f"it has not joined within {self._config.wait_s:g} s; {last}"

    def _nodes(self, worker: str) -> list[str]:
        return [part.node.name for part in self._plan.parts if part.worker.name == worker]

    async def _hand_overs(self, sessions: CheckSessions, joined: set[str]) -> list[Finding]:
        """Checks every pair. A worker takes part in one hand-over at a time, so that none slows another one down."""
        workers = [worker for worker in self._plan.topology.workers if worker.name in joined]
        prefill = [worker.name for worker in workers if worker.role == "prefill"]
        decode: list[str | None] = [worker.name for worker in workers if worker.role == "decode"]
        decode += [None] * (len(prefill) - len(decode))

        async def one(source: str, target: str) -> Finding:
            where = f"{source} ({self._host(source)}) → {target} ({self._host(target)})"
            try:
                measured = await sessions.hand_over(source, target, self._config.limit_s)
            except HandoffError as error:
                self._unusable |= dict.fromkeys((source, target), f"{where}: {error.message}")
                return Finding("hand-over", where, error.message)
            return Finding("hand-over", where, "", measured.seconds, measured.num_bytes)

        findings: list[Finding] = []
        for turn in range(len(decode) if prefill else 0):
            pairs = [(source, decode[(index + turn) % len(decode)]) for index, source in enumerate(prefill)]
            findings += await asyncio.gather(*(one(source, target) for source, target in pairs if target is not None))
        return sorted(findings, key=lambda finding: finding.where)

    def _host(self, worker: str) -> str:
        return self._plan.topology.node(self._nodes(worker)[0]).address

    async def _exited(self) -> list[Finding]:
        """Waits until the workers of this host, which drain, have exited; returns those that failed only now."""
        reported, deadline = set(self._failed), time.monotonic() + EXIT_S
        while time.monotonic() < deadline and any(child.poll() is None for child in self._children.values()):
            await asyncio.sleep(POLL_S)
        self._look()
        running = {name: f"still running after {EXIT_S:g} s" for name, c in self._children.items() if c.poll() is None}
        reported |= {name for name, part in self._members.parts.items() if part.worker.name in self._unusable}
        late = {name: why for name, why in (running | self._failed).items() if name not in reported}
        return [Finding("exit", name, why) for name, why in late.items()]

    async def _follow(self) -> list[Finding]:
        """Runs this host's workers until the doctor of the coordinator's node has drained them."""
        self._start(self._members.addresses)
        front, started = self._plan.topology.front, time.monotonic()
        self.console.stage("check", f"the doctor of node {front.name} ({front.address}) prints the table of hand-overs")
        pairs = len(self._plan.topology.workers) ** 2
        limit_s = self._config.wait_s + pairs * self._config.limit_s + EXIT_S
        try:
            while any(child.poll() is None for child in self._children.values()):
                if time.monotonic() - started > limit_s:
                    break
                await asyncio.sleep(POLL_S)
            self._look()
            findings = []
            for name in self._members.parts:
                if (child := self._children.get(name)) is not None and child.poll() is None:
                    where = host_port(front.address, coordinator_options(self._plan).control_port)
                    line = next((line.strip() for line in reversed(child.tail()) if line.strip()), "no output")
                    why = f"the doctor of node {front.name} at {where} has not drained it within {limit_s:g} s"
                    findings.append(Finding("no reply", name, f"{why}; its last line: {line}"))
                else:
                    findings.append(Finding("join", name, self._failed.get(name, "")))
            return findings
        finally:
            self._kill()

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()
