"""Workers of several ranks join, compute and end as one worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.support import oracle
from tests.support.checkpoints import make_checkpoint
from tests.support.client import body
from tests.support.forks import start
from tests.support.launchers import find_box
from tests.support.limits import HANG_S, Stall
from tests.support.processes import has_exited, listening
from tests.support.topologies import free_ports

START_S = 120.0  # long enough to mean a hang: several processes import torch at the same time
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

AGENT = ("-m", "launch.agent")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PROMPT = tuple(range(30, 130))
HANG_LIMIT_S = 90.0  # an agent kills ranks that are silent for 60 s


class Jobs:
    """A coordinator and multi-rank jobs, each with a log. Processes that remain at the end are killed."""

    def __init__(self, model: Path, where: Path) -> None:
        self.model, self.where = model, where
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        ready = where / "ready.json"
        flags = ["--port", "0", "--grpc-port", "0", "--control-port", "0", "--ready-file", str(ready)]
        flags += ["--served-model-name", "m"]
        self.coordinator = self._start("coordinator", ["-m", "coordinator", "--model", str(model), *flags])
        self.wait_until(ready.exists, "coordinator")
        self.addresses: dict[str, str] = json.loads(ready.read_text())
        self.http = httpx.Client(base_url=f"http://{self.addresses['http']}", timeout=30.0)

    def start(
        self, role: str, ranks: int, program: tuple[str, ...] = AGENT, **flags: object
    ) -> subprocess.Popen[bytes]:
        settings = {"model": self.model, "coordinator": self.addresses["control"], "worker_id": role, **flags}
        words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return self._start(role, [*program, "--nproc-per-node", str(ranks), "-m", role, "--dtype", "float32", *words])

    def worker(self, worker_id: str) -> dict[str, Any]:
        workers: list[dict[str, Any]] = self.http.get("/workers").json()["workers"]
        return next((w for w in workers if w["id"] == worker_id), {"state": "unknown"})

    def await_state(self, worker_id: str, state: str) -> dict[str, Any]:
        self.wait_until(lambda: self.worker(worker_id)["state"] == state, f"{worker_id} {state}")
        return self.worker(worker_id)

    def log(self, name: str) -> str:
        return (self.where / f"{name}.log").read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.running)
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{logs}"
            time.sleep(0.02)

    def _start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        with (self.where / f"{name}.log").open("wb") as log:
            process = start([sys.executable, *words], stdout=log, stderr=log, env=ENVIRONMENT)
        self.running[name] = process
        return process

    def close(self) -> None:
        self.http.close()
        for process in reversed(self.running.values()):
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    started = Jobs(make_checkpoint(tmp_path / "m", "llama"), tmp_path)
    yield started
    started.close()


def test_two_ranks_join_compute_and_drain_as_one_worker(jobs: Jobs) -> None:
    decode, prefill = jobs.start("decode", 1), jobs.start("prefill", 2)
    jobs.await_state("decode", "ready")
    pids = jobs.await_state("prefill", "ready")["pids"]
    assert len(set(pids)) == 2
    assert {address for pid in pids for address, _ in listening(pid)} == {"127.0.0.1"}
    for length in (1, 40, 100):  # requests that end at their first token: no KV is handed over
        answer = jobs.http.post("/v1/completions", json=body(PROMPT[:length], 1)).json()
        expected = oracle.greedy(jobs.model, PROMPT[:length], 1)
        assert tuple(answer["choices"][0]["token_ids"])[: expected.decided] == expected.tokens[: expected.decided]
    prefill_worker = jobs.worker("prefill")
    assert (prefill_worker["prompt_tokens_computed"], prefill_worker["prompt_tokens_cached"]) == (1 + 40 + 68, 32)
    jobs.coordinator.terminate()
    assert (prefill.wait(2 * HANG_S), decode.wait(2 * HANG_S)) == (0, 0), jobs.log("prefill")
    assert all(map(has_exited, pids))


@pytest.mark.long  # test_fault_ranks.py times the same, tests/launch/test_agent.py reads what an agent prints
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_detected_within_half_a_second_and_reported_and_its_worker_ends(
    jobs: Jobs, victim: int
) -> None:
    prefill = jobs.start("prefill", 2)
    pids = jobs.await_state("prefill", "ready")["pids"]
    end = os.pidfd_open(pids[1 - victim])
    with Stall() as stall:
        os.kill(pids[victim], signal.SIGKILL)
        detected = f"(detected by rank {1 - victim})"
        jobs.wait_until(lambda: detected in jobs.log("prefill"), detected, HANG_S)
    assert stall.took_s < stall.allows(0.5)
    with Stall() as stall:
        assert select.select([end], [], [], HANG_S)[0], f"the other rank lives on\n{jobs.log('prefill')}"
    os.close(end)
    assert stall.took_s < stall.allows(0.5)
    jobs.wait_until(lambda: has_exited(pids[1 - victim]), "its agent to reap it", HANG_S)
    assert prefill.wait(30) == 128 + signal.SIGKILL
    lines = jobs.log("prefill").strip().splitlines()
    shown = find_box(lines)
    assert shown[-1] == lines[-1] and f"prefill, rank {victim} of 2, pid {pids[victim]}" in shown[1]
    assert socket.gethostname() in shown[2] and "killed by SIGKILL" in shown[3]
    assert jobs.await_state("prefill", "lost")


def test_the_error_box_names_the_rank_whose_weight_shard_is_damaged(jobs: Jobs) -> None:
    """NaN in the last columns of a row-parallel weight: only rank 1 reads them; rank 0 ends because rank 1 ended."""
    weights = jobs.model / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"][:, -1] = float("nan")
    save_file(tensors, weights)
    assert jobs.start("prefill", 2).wait(START_S) == 3
    lines = jobs.log("prefill").strip().splitlines()
    shown = find_box(lines)
    assert shown[-1] == lines[-1] and "prefill, rank 1 of 2" in shown[1] and "exit code 3" in shown[3]
    assert "model.layers.1.mlp.down_proj.weight" in shown[4] and "rank 0" not in " ".join(shown)


@pytest.mark.long
def test_a_leader_ends_within_six_seconds_after_its_follower_is_stopped(jobs: Jobs) -> None:
    prefill = jobs.start("prefill", 2)
    pids = jobs.await_state("prefill", "ready")["pids"]
    stopped = time.monotonic()
    os.kill(pids[1], signal.SIGSTOP)
    jobs.wait_until(lambda: has_exited(pids[0]), "end of the leader", 10.0)
    assert time.monotonic() - stopped < 6.0
    assert re.search(r"error: rank 1 was silent for [45]\.\d s", jobs.log("prefill"))  # 5 s if cores are scarce
    os.kill(pids[1], signal.SIGCONT)
    assert prefill.wait(60) != 0


@pytest.mark.long
def test_a_worker_started_by_torchrun_joins_and_drains(jobs: Jobs) -> None:
    prefill = jobs.start("prefill", 2, TORCHRUN)
    jobs.await_state("prefill", "ready")
    jobs.coordinator.terminate()
    assert prefill.wait(30) == 0


def on_two_nodes(jobs: Jobs) -> Callable[[int], subprocess.Popen[bytes]]:
    """Returns a function that starts the agent of node 0 or 1 of a prefill worker; its log has the node's number."""
    (port,) = free_ports(1)
    nodes = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank")

    def start(node: int) -> subprocess.Popen[bytes]:
        jobs.running[str(node)] = started = jobs.start("prefill", 1, (*AGENT, *nodes, str(node)))
        (jobs.where / "prefill.log").rename(jobs.where / f"{node}.log")
        del jobs.running["prefill"]
        return started

    return start


@pytest.mark.long
def test_a_worker_on_two_nodes_joins_when_its_second_node_starts_first(jobs: Jobs) -> None:
    """Rank 0 serves the store. The second node may start first."""
    start = on_two_nodes(jobs)
    first = start(1)
    jobs.wait_until(lambda: "waiting up to 600 s for rank 0 of this worker" in jobs.log("1"), "notice")
    second = start(0)
    assert len(jobs.await_state("prefill", "ready")["pids"]) == 2
    jobs.coordinator.terminate()
    assert (first.wait(30), second.wait(30)) == (0, 0)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hung_rank_on_a_node_of_its_own_is_killed_and_its_worker_rejoins(jobs: Jobs, victim: int) -> None:
    """The agents are restarted here, as a supervisor on each node would do."""
    start = on_two_nodes(jobs)
    agents = [start(node) for node in (0, 1)]
    pids = jobs.await_state("prefill", "ready")["pids"]
    os.kill(pids[victim], signal.SIGSTOP)
    assert agents[1 - victim].wait(30) not in (0, None)
    start(1 - victim)
    assert agents[victim].wait(HANG_LIMIT_S) == 128 + signal.SIGKILL
    assert has_exited(pids[victim])
    shown = " ".join(find_box(jobs.log(str(victim)).splitlines()))
    assert f"pid {pids[victim]}" in shown and "hung: no heartbeat for 60 s" in shown, shown
    start(victim)
    jobs.wait_until(lambda: jobs.worker("prefill")["state"] == "ready", "restarted worker")
    assert not set(jobs.worker("prefill")["pids"]) & set(pids)
