"""The members of a cluster on this host: starts the coordinator, then each worker's agent and the batches process, and
supervises them.

If the coordinator runs on another host, the workers dial that host, and the launcher there does steps 1 and 4; a signal
here goes to the workers' agents.

Lifecycle of a local cluster:

1. start     the coordinator starts and writes its addresses to a ready-file once all ports are open
2. load      every worker starts on its own cores, loads, and joins: GET /workers shows its pid as ready
3. ready     the address is printed; a member that dies after it has joined is restarted with backoff
4. stop      SIGINT, SIGTERM or SIGHUP: SIGTERM to the batches process, which sends no further line, and to the
             coordinator, which drains the workers over their sessions; all exit 0. After drain_timeout_s + 5 s, or at a
             second signal, the rest is killed; workers AGENT_EXIT_S after the coordinator, unless batches still end

A startup error before a member ever joined stops everything at once, and the box about it is printed last. In every
case nothing is left running: the children die with this process even under SIGKILL (`baton.runtime.process`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton.core.errors import StartupError
from baton.runtime.model_source import has_chat_template, resolve_model
from coordinator.connections import few_connections
from coordinator.text.pooling import read_pooling
from launch.autoscale.law import Policy
from launch.autoscale.observe import Autoscaler
from launch.child import Child, ChildSpec
from launch.cluster_api import Row, get_cluster
from launch.console import Console
from launch.failure import describe_exit
from launch.members import Addresses, Members
from launch.plan import BATCHES, COORDINATOR
from launch.roll import Roll, take_request
from launch.run_directory import write_addresses
from launch.supervisor import Backoff, MemberFailed, Signals, Supervised
from sim.scale.planner import Size

TICK_S = 0.2
STARTING_TICK_S = 0.05  # a user waits for `ready`
REMIND_S = 10.0
COORDINATOR_START_TIMEOUT_S = 60.0
STOP_GRACE_S = 5.0
AGENT_EXIT_S = 10.0
AUTOSCALE_EVERY_S = 1.0
FAILED_RETRY_S = 30.0


class LocalCluster:
    """The members of a cluster on this host, from their first start to their end."""

    def __init__(
        self, members: Members, console: Console, backoff: Backoff | None = None, policy: Policy | None = None
    ) -> None:
        """With a `policy` the workers of this host follow the load."""
        self._policy = policy
        self._autoscaler: Autoscaler | None = None  # from the first look at the coordinator on
        self._looked_at = 0.0
        self._retry_at: dict[str, float] = {}  # of workers that could not start
        self._members = members
        self._console = console
        # Whether `ready` was printed.
        self._announced = False
        # Until then workers that left are restarted, because their coordinator was.
        self._restart_left_until = 0.0
        self._workers = [Supervised(name, partial(self._worker_spec, name), console, backoff) for name in members.parts]
        self._all = self._workers
        self._coordinator: Supervised | None = None
        self._batches: Supervised | None = None
        # While `baton roll` runs.
        self._roll: Roll | None = None
        # None until the coordinator of this host has bound them.
        self._addresses: Addresses | None = members.addresses
        # Workers of other hosts that have not joined yet.
        self._remote_pending: set[str] = set()
        if members.has_coordinator:
            self._coordinator = Supervised(COORDINATOR, self._coordinator_spec, console, backoff)
            self._all = [self._coordinator, *self._workers]
            if members.has_batches:
                self._batches = Supervised(BATCHES, self._batches_spec, console, backoff)
                self._all.append(self._batches)
            self._addresses = None
            here = {part.worker.name for part in members.parts.values()}
            self._remote_pending = {worker.name for worker in members.plan.topology.workers} - here
        # The parts of each worker that may be started and drained: all of them are on this host.
        self._scalable: dict[str, list[Supervised]] = {}
        for worker in members.plan.topology.workers:
            parts = [m for m in self._workers if members.parts[m.name].worker.name == worker.name]
            if len(parts) == len(worker.nodes):
                self._scalable[worker.name] = parts
        if policy is not None:
            self._follow(policy.least)

    # For a roll.

    def groups(self) -> dict[str, list[list[Supervised]]]:
        """Returns the parts of each worker that this host runs, by role. Raises StartupError if another host runs some
        of a worker."""
        groups: dict[str, dict[str, list[Supervised]]] = {"prefill": {}, "decode": {}}
        for supervised in (worker for worker in self._workers if not worker.retired):
            worker = self._members.parts[supervised.name].worker
            groups[worker.role].setdefault(worker.name, []).append(supervised)
        for name, count in Counter(part.worker.name for part in self._members.plan.parts).items():
            here = [parts for workers in groups.values() if (parts := workers.get(name))]
            if here and len(here[0]) < count:
                raise StartupError(f"{name} runs on several hosts: replace it by hand, on all of them")
        return {role: list(workers.values()) for role, workers in groups.items()}

    @property
    def coordinator(self) -> Supervised | None:
        return self._coordinator

    @property
    def batches(self) -> Supervised | None:
        return self._batches

    def drain_timeout_s(self, name: str) -> float:
        return self._members.drain_timeout_of(name)

    def drains(self, name: str) -> bool:
        return any(row["id"] == name and row["state"] == "draining" for row in self._workers_there())

    def succeed_coordinator(self) -> Child:
        if self._coordinator is None or (old := self._coordinator.child) is None:
            raise StartupError("the coordinator is not running")
        with contextlib.suppress(OSError):  # of the present run
            self._members.ready_file.unlink(missing_ok=True)
        self._coordinator.succeed(self._members.coordinator(self._addresses, take_over=True))
        return old

    def restore_coordinator(self, child: Child) -> None:
        if self._coordinator is not None:
            self._coordinator.restore(child)

    def _tick_roll(self) -> None:
        if self._roll is None:
            if not take_request(self._members.run_dir, self._console):
                return
            self._console.stage("roll", "replacing every process, one after the other")
            start_s = self._members.start_timeout_s
            self._roll = Roll(self, self._members.run_dir, self._console, start_timeout_s=start_s)
        self._roll.tick()
        if self._roll.ended:
            self._roll = None

    @property
    def _front_is_up(self) -> bool:
        """Whether the coordinator is up. One on another host is assumed to be up: the workers redial until it is."""
        return self._coordinator is None or self._coordinator.joined

    def run(self) -> int:
        """Runs until a signal, or until another host's coordinator has drained all workers here; returns the exit code.

        Raises:
            StartupError, MemberFailed: the cluster cannot start; nothing is left running.
        """
        with Signals() as signals:
            try:
                if self._coordinator is not None:
                    self._coordinator.start()
                reminded = time.monotonic()
                while not signals.stops:
                    left = all(worker.left for worker in self._workers)
                    if self._coordinator is None and self._roll is None and left:
                        self._console.stage("stopped", "the coordinator has drained every worker of this host")
                        return 0
                    self._tick()
                    if not self._announced and time.monotonic() - reminded >= REMIND_S:
                        reminded = time.monotonic()
                        logs = self._members.run_dir
                        self._console.stage("waiting", f"for {', '.join(self._late())}; logs in {logs}")
                    signals.wait(TICK_S if self._announced else STARTING_TICK_S)
                return self._stop(signals)
            finally:
                for member in reversed(self._all):
                    member.kill()

    def _tick(self) -> None:
        if self._coordinator is not None:
            self._tick_coordinator(self._coordinator)
        self._hurry_missing_roles()
        if self._policy is not None and self._front_is_up and self._roll is None:
            self._autoscale(self._policy)
        for worker in self._workers:
            if time.monotonic() < self._restart_left_until and not worker.retired:
                worker.left = False
            if worker.ever_started:
                self._survive(worker, worker.tick)
            elif self._front_is_up:
                worker.start_again()  # it may have run before, and left with its coordinator
        if self._batches is not None:  # last: a user waits for the workers
            self._tick_batches(self._batches)
        if self._front_is_up:
            self._look_for_joined()
        if not self._announced:
            self._announce_when_ready()
        else:
            self._tick_roll()

    def _autoscale(self, policy: Policy) -> None:
        """Asks the law once per AUTOSCALE_EVERY_S, and starts and drains workers."""
        now = time.monotonic()
        if now - self._looked_at < AUTOSCALE_EVERY_S:
            return
        self._looked_at = now
        if self._autoscaler is None:
            log = partial(self._console.stage, "autoscale")
            self._autoscaler = Autoscaler(policy, self._bound().admin_url, log)
        if (size := self._autoscaler.look(acts=True)) is not None:
            self._follow(size)

    def _follow(self, size: Size) -> None:
        """Retires or returns workers of this host, so that the cluster has as many of each role. Those that are not
        ready (lost, or drained by an operator) are retired first, then the last of the topology. One that still drains
        is not returned: another one is, or it later."""
        active: dict[str, list[str]] = {"prefill": [], "decode": []}
        ended: dict[str, list[str]] = {"prefill": [], "decode": []}
        ready = {} if self._autoscaler is None else self._autoscaler.roles
        for worker in self._members.plan.topology.workers:
            parts = self._scalable.get(worker.name, [])
            if not any(part.retired or part.left for part in parts):
                active[ready.get(worker.name, worker.role)].append(worker.name)
            elif all(part.child is None and self._retry_at.get(part.name, 0.0) <= time.monotonic() for part in parts):
                ended[worker.role].append(worker.name)
        for role, names in active.items():
            joined = {name for name in names if all(part.joined for part in self._scalable.get(name, []))}
            names.sort(key=lambda name: (name not in ready, name not in joined))
            count = getattr(size, role)
            for part in (part for name in names[count:] for part in self._scalable.get(name, [])):
                if part.child is not None:  # also if the size is as before: another command may have changed a role
                    self._console.stage(part.name, f"draining   {count} of {len(names)} {role} workers are kept")
                part.retire()
            for part in (part for name in ended[role][: max(count - len(names), 0)] for part in self._scalable[name]):
                self._survive(part, part.return_to_work)

    def _survive(self, worker: Supervised, act: Callable[[], None]) -> None:
        """A worker that the autoscaler started and that cannot start does not end those that serve: it counts as ended,
        and the law decides about another start. Raises what `act` raises, unless the cluster was ready before."""
        try:
            act()
        except (MemberFailed, StartupError) as error:
            if self._policy is None or not self._announced:
                raise
            self._console.quote(str(error).splitlines())
            worker.retire()
            self._retry_at[worker.name] = time.monotonic() + FAILED_RETRY_S

    def _hurry_missing_roles(self) -> None:
        """Restarts workers without their whole delay while no worker of their role is ready: requests wait for it."""
        waiting = [worker for worker in self._workers if worker.restart_at is not None]
        if waiting and self._front_is_up:
            ready = {row["role"] for row in self._workers_there() if row["state"] == "ready"}
            for worker in waiting:
                if self._members.parts[worker.name].role not in ready:
                    worker.hurry()

    def _tick_coordinator(self, coordinator: Supervised) -> None:
        if coordinator.left:  # it alone was stopped, and drained all workers: restart it and them
            coordinator.start_again()
            self._restart_left_until = time.monotonic() + AGENT_EXIT_S
        else:
            coordinator.tick()
        if coordinator.child is not None and not coordinator.joined:
            self._look_for_ready_file(coordinator)

    def _tick_batches(self, batches: Supervised) -> None:
        if batches.left:  # it alone was stopped
            batches.start_again()
        elif batches.ever_started:
            batches.tick()
        elif self._front_is_up:
            batches.start()
        if batches.child is not None and not batches.joined and self._members.batches_ready_file.exists():
            batches.mark_joined("up")

    def _batches_spec(self) -> ChildSpec:
        """Returns the spec of a run that starts now; removes the ready-file of the previous run."""
        with contextlib.suppress(OSError):  # the run directory was checked to be writable
            self._members.batches_ready_file.unlink(missing_ok=True)
        return self._members.batches(self._bound())

    def _coordinator_spec(self) -> ChildSpec:
        """Returns the spec of a run that starts now; removes the ready-file of the previous run."""
        with contextlib.suppress(OSError):  # the run directory was checked to be writable
            self._members.ready_file.unlink(missing_ok=True)
        return self._members.coordinator(self._addresses)

    def _worker_spec(self, name: str) -> ChildSpec:
        return self._members.worker(name, self._bound())

    def _look_for_ready_file(self, coordinator: Supervised) -> None:
        try:
            addresses = Addresses(**json.loads(self._members.ready_file.read_text()))
        except (OSError, ValueError, TypeError):
            if self._console.elapsed_s() > COORDINATOR_START_TIMEOUT_S and self._addresses is None:
                log = self._members.run_dir / "coordinator.log"
                reason = f"the coordinator opened no ports within {COORDINATOR_START_TIMEOUT_S:.0f} s"
                raise StartupError(f"{reason}; its log is {log}") from None
            return
        self._addresses = addresses
        coordinator.mark_joined(f"up         http {addresses.http}   grpc {addresses.grpc}")
        for worker in self._workers:
            worker.joined = False  # they redial; GET /workers shows when they have joined

    def _look_for_joined(self) -> None:
        waiting = [worker for worker in self._workers if worker.child is not None and not worker.joined]
        if not waiting and not self._remote_pending:
            return
        views = {row["id"]: row for row in self._workers_there()}
        for worker in waiting:
            view = views.get(self._members.parts[worker.name].worker.name)
            if view and view["state"] == "ready" and worker.child and worker.child.pids().intersection(view["pids"]):
                worker.mark_joined("joined")
        for name in sorted(self._remote_pending):
            if name in views and views[name]["state"] == "ready":
                self._remote_pending.remove(name)
                self._console.stage(name, f"joined   on {views[name].get('host', 'another host')}")

    def _workers_there(self) -> tuple[Row, ...]:
        """Returns the workers of GET /workers; empty if the coordinator does not reply."""
        try:
            return get_cluster(self._bound().admin_url).workers
        except StartupError:
            return ()

    def _announce_when_ready(self) -> None:
        late = self._late()
        if late:
            if self._console.elapsed_s() > self._members.start_timeout_s:
                raise StartupError(
                    f"not ready after {self._members.start_timeout_s:.0f} s, still waiting for {', '.join(late)}; "
                    f"see the logs in {self._members.run_dir}, or raise --start-timeout-s"
                )
            return
        self._announced = True
        addresses = self._bound()
        known = {"http": addresses.http, "grpc": addresses.grpc, "control": addresses.control, "url": addresses.url}
        known |= {"admin": addresses.admin_url} if addresses.admin else {}
        write_addresses(self._members.run_dir, {**known, "pid": os.getpid()})
        if addresses.admin:
            self._console.stage("ready", f"{addresses.admin_url}   for operators: baton ps {addresses.admin_url}")
        if self._coordinator is not None and (few := few_connections()):
            self._console.stage("limit", few)
        for line in self._chosen():
            self._console.stage("configured", line)
        self._console.stage("ready", f"{addresses.url}   try:")
        plan = self._members.plan
        runner = str(plan.topology.coordinator.options.get("runner", "auto"))
        example = example_curl(addresses.url, plan.served_name, example_request(plan.model, runner), key=plan.has_keys)
        self._console.plain(example)

    def _chosen(self) -> list[str]:
        """Returns the settings that the workers chose themselves, as they reported them when they joined."""
        facts: dict[str, list[str]] = {}
        for f in self._workers_there():
            quantized = "" if f.get("quantize") in (None, "none") else f" and {f['quantize']} weights"
            stored = "" if f.get("kv_dtype") == f.get("dtype") else f" and {f.get('kv_dtype')} KV"
            kind = f"{f.get('dtype')}{quantized}{stored}"
            room = f"{f.get('blocks_total')} KV blocks of {f.get('block_size')} tokens"
            settings = f"{kind}, {room}, at most {f.get('max_model_len')} tokens a sequence"
            facts.setdefault(settings, []).append(f["id"])
        why = "override with --dtype, --kv-memory-gib, --max-model-len"
        return [f"{settings} ({', '.join(names)}); {why}" for settings, names in facts.items()]

    def _late(self) -> list[str]:
        late = [member.name for member in self._all if not member.joined and not member.left]
        return [*late, *sorted(self._remote_pending)]

    def _stop(self, signals: Signals) -> int:
        """Drains through the coordinator; kills what cannot be drained. Returns the exit code."""
        limit = self._members.drain_timeout_s + STOP_GRACE_S
        deadline = time.monotonic() + limit
        self._console.stage("stopping", f"draining for up to {limit:.0f} s; a second Ctrl-C kills it immediately")
        if self._roll is not None:
            self._roll.close()  # leaves one coordinator
        coordinator = self._coordinator.child if self._coordinator else None
        batches = self._batches.child if self._batches else None
        if batches is not None:
            batches.terminate()
        draining = [(w.name, w.child) for w in self._workers if w.child and w.joined and self._front_is_up]
        for worker in self._workers:
            if (worker.name, worker.child) not in draining:
                worker.kill()  # loading, between two runs, or without a coordinator: it has no request
        if batches is not None and self._batches is not None and self._batches.joined:
            draining.append((BATCHES, batches))
        if coordinator is not None:
            coordinator.terminate()
            if self._front_is_up:
                draining.append((COORDINATOR, coordinator))
        if self._coordinator is None:
            for worker in self._workers:
                worker.drain()
        workers_by = deadline
        while running := [name for name, child in draining if child.poll() is None]:
            now = time.monotonic()
            if coordinator is not None and coordinator.poll() is not None:
                workers_by, coordinator = min(deadline, now + AGENT_EXIT_S), None
            # The batches process still stores the responses of its lines then.
            if signals.stops >= 2 or now >= (deadline if BATCHES in running else workers_by):
                break
            signals.wait(TICK_S)
        failed = False
        for name, child in draining:
            code = child.poll()
            if code != 0:
                failed = True
                how = "still running, killing it" if code is None else f"failed: {describe_exit(code)}"
                self._console.stage(name, f"{how}; log {child.spec.log}")
        self._console.stage("stopped", "some processes failed" if failed else "all processes exited with 0")
        return 130 if signals.stops >= 2 else int(failed)

    def _bound(self) -> Addresses:
        if self._addresses is None:
            raise AssertionError("a worker needs the coordinator's address")
        return self._addresses


def example_request(model: str, runner: str) -> dict[str, Any]:
    """Returns a request that suits the model: the built-in one was trained on Python, a base model has no chats."""
    with contextlib.suppress(StartupError):
        directory = resolve_model(model)
        served = read_pooling(directory, runner=runner)
        if len(served.labels) == 1:
            return {"query": "What is the capital of France?", "documents": ["It is Paris.", "Bread is baked."]}
        if not served.generates:
            return {"input": "The capital of France is Paris."}
        if directory == resolve_model("builtin"):
            return {"prompt": "def read_lines(path):"}
        if has_chat_template(directory):
            return {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    return {"prompt": "The capital of France is"}


def example_curl(url: str, model: str, request: Mapping[str, Any], *, key: bool) -> str:
    paths = {"messages": "chat/completions", "prompt": "completions", "input": "embeddings", "query": "rerank"}
    path = next(path for field, path in paths.items() if field in request)
    body = json.dumps({"model": model, **request, **({"max_tokens": 64} if "completions" in path else {})})
    header = " -H 'Authorization: Bearer YOUR-KEY'" if key else ""
    address = shlex.quote(f"{url}/v1/{path}")  # a shell may expand the brackets of an IPv6 address
    return f"curl -s {address}{header} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
