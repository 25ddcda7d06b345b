"""A cluster over several nodes, each a network namespace: it produces the same tokens as on one host, listens only on
the configured addresses, and a cable that is cut for ten seconds causes only a pause."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import netns, oracle
from tests.support.checkpoints import make_checkpoint
from tests.support.client import body

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(reason := netns.missing()), reason=reason or "never"),
]

NODES = ("head", "p0a", "p0b", "p1", "d0", "d1")
CUT_S = 10.0
LONG = 3900
"""Length in tokens of a stream that must still run when a cable is cut."""
LIMIT_S = 25.0  # a lease, a ping, an edge's timeout and a dial in sequence, on a slow machine
HTTP, GRPC, CONTROL, RENDEZVOUS = 8100, 8102, 8101, 8200
PROMPTS = [[9 + n] * 20 + list(range(30, 90)) for n in range(4)]


@dataclass
class Job:
    node: netns.Node
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None


@dataclass
class StreamResult:
    """How a stream ended."""

    tokens: list[int] = field(default_factory=list)
    error: str = ""
    took_s: float = 0.0


class Cluster:
    """Processes on their nodes. While a test waits, processes that have ended are restarted, as a supervisor would."""

    def __init__(self, network: dict[str, netns.Node], model: Path, where: Path) -> None:
        self.network, self.model, self._where = network, model, where
        self._threads: ThreadPoolExecutor = network["head"].threads(16)
        self._url = f"http://{network['head'].address}:{HTTP}"
        head = network["head"].address
        token = where / "token"
        token.write_text("a secret of thirty-two characters and more\n")
        token.chmod(0o600)
        self._common = ["--model", str(model), "--cluster-token-file", str(token)]
        self._joining = ["--coordinator", f"{head}:{CONTROL}", "--dtype", "float32", "--threads", "1"]
        self._joining += ["--kv-memory-gib", "0.02", "--step-tokens", "64", "--no-prefix-cache"]  # no cache affinity
        ports = ["--port", str(HTTP), "--grpc-port", str(GRPC), "--control-port", str(CONTROL)]
        hosts = ["--host", head, "--control-host", head, "--served-model-name", "m"]
        self.jobs: dict[str, Job] = {}
        self._add("head", "head", ["coordinator", *hosts, *ports])
        first = network["p0a"].address
        for rank, node in enumerate(("p0a", "p0b")):
            ranks = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--max-restarts", "0"]
            meet = ["--master-addr", first, "--master-port", str(RENDEZVOUS), "-m"]
            self._add(node, "p0", ["launch.agent", *ranks, *meet, "prefill"])
        for worker, role in (("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
            self._add(worker, worker, [role])
        self.restart_ended()

    def _add(self, node: str, worker: str, words: list[str]) -> None:
        own = [] if node == "head" else [*self._joining, "--worker-id", worker, "--host", self.network[node].address]
        command = [sys.executable, "-m", *words, *self._common, *own]
        self.jobs[node] = Job(self.network[node], command, self._where / f"{node}.log")

    def restart_ended(self) -> None:
        for job in self.jobs.values():
            if job.process is None or job.process.poll() is not None:
                with job.log.open("ab") as log:
                    job.process = job.node.start(job.command, forked=True, stdout=log, stderr=log)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{self.logs()}"
            self.restart_ended()
            time.sleep(0.1)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Empty while the coordinator does not reply."""

        def get() -> dict[str, dict[str, Any]]:
            try:
                listed = httpx.get(f"{self._url}/workers", timeout=5.0).json()["workers"]
            except httpx.HTTPError:
                return {}
            return {w["id"]: w for w in listed}

        return self._threads.submit(get).result()

    def all_ready(self) -> bool:
        known = self.workers()
        return all(known.get(w, {}).get("state") == "ready" for w in ("p0", "p1", "d0", "d1"))

    def idle(self) -> bool:
        return all(w["blocks_free"] == w["blocks_total"] and not w["sequences"] for w in self.workers().values())

    def stream(self, prompt: list[int], count: int) -> Future[StreamResult]:
        def read() -> StreamResult:
            reply, started = StreamResult(), time.monotonic()
            sent = body(prompt, count, stream=True)
            with httpx.stream("POST", f"{self._url}/v1/completions", json=sent, timeout=120.0) as answer:
                if answer.status_code != 200:
                    reply.error = json.loads(answer.read())["error"]["code"]
                for line in answer.iter_lines() if not reply.error else ():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        reply.error = event.get("error", {}).get("code", reply.error)
                        reply.tokens += [t for c in event.get("choices", []) for t in c["token_ids"]]
            reply.took_s = time.monotonic() - started
            return reply

        return self._threads.submit(read)

    def logs(self) -> str:
        return "\n".join(f"--- {n}\n{job.log.read_text(errors='replace')[-3000:]}" for n, job in self.jobs.items())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    where = tmp_path_factory.mktemp("nodes")
    model = make_checkpoint(where / "m", "llama", max_position_embeddings=4096)
    with netns.nodes(*NODES) as network:
        started = Cluster(network, model, where)
        try:
            started.wait_until(started.all_ready, "ready cluster", 180.0)
            yield started
        finally:
            started.close()


def is_correct(running: Cluster, prompt: list[int], reply: StreamResult) -> bool:
    expected = oracle.greedy(running.model, prompt, 8, likely=reply.tokens)
    return tuple(reply.tokens[: expected.decided]) == expected.tokens[: expected.decided] and len(reply.tokens) == 8


def test_tokens_over_several_nodes_equal_the_reference(running: Cluster) -> None:
    asked = [(prompt, running.stream(prompt, 8)) for prompt in PROMPTS * 4]
    assert all(is_correct(running, prompt, future.result()) for prompt, future in asked)
    known = running.workers()
    assert all(known[w]["kv_bytes_sent"] for w in ("p0", "p1")), known
    assert all(known[w]["kv_bytes_received"] for w in ("d0", "d1")), known


def test_processes_listen_only_on_configured_addresses(running: Cluster) -> None:
    listening = {name: node.listeners() for name, node in running.network.items()}
    named = {name: {node.address, "127.0.0.1"} for name, node in running.network.items()}
    assert not [(n, a, who) for n, found in listening.items() for a, who in found if a not in named[n]]
    assert len(listening["head"]) == 3  # HTTP, gRPC, control
    assert all(found for name, found in listening.items() if name.startswith("d"))


CUTS = [
    pytest.param(node, end, marks=() if (node, end) == ("d0", "far") else pytest.mark.long)
    for node in ("d0", "p1", "p0b")
    for end in ("far", "near")
]


def cut_in_mid_stream(running: Cluster, node: str, end: str) -> list[Future[StreamResult]]:
    """Starts a stream on each decode worker and cuts the cable while both run. On a busy machine it may take seconds to
    create the edges, or to take the link down while the kernel still removes other namespaces: if a stream has ended by
    then, this starts over."""
    for _ in range(5):
        running.wait_until(lambda: running.all_ready() and running.idle(), "whole and idle cluster")
        streams = [running.stream(PROMPTS[n], LONG) for n in range(2)]
        busy = lambda: all(running.workers()[d]["running"] for d in ("d0", "d1"))  # noqa: E731
        ended = lambda: any(stream.done() for stream in streams)  # noqa: B023, E731
        running.wait_until(lambda: busy() or ended(), "a stream on each decode worker")  # noqa: B023
        if ended():
            continue
        asked = time.monotonic()
        running.network[node].cut(end)
        if time.monotonic() - asked < 0.5 and not ended():
            return streams
        running.network[node].mend(end)
    raise AssertionError("no cable was cut while both streams ran")


@pytest.mark.parametrize(("node", "end"), CUTS)
def test_requests_and_streams_survive_a_cable_cut_for_ten_seconds(running: Cluster, node: str, end: str) -> None:
    """`far`: at the switch, packets are dropped silently; `near`: at the node, whose interface goes down."""
    worker = {"p0b": "p0"}.get(node, node)
    moved = "kv_bytes_received" if worker.startswith("d") else "kv_bytes_sent"
    long_ones = cut_in_mid_stream(running, node, end)
    cut_at, asked = time.monotonic(), []
    while time.monotonic() - cut_at < CUT_S:
        prompt = PROMPTS[len(asked) % 4]
        asked.append((prompt, running.stream(prompt, 8)))
        time.sleep(1.0)
    assert running.workers().get(worker, {}).get("state") == "lost"
    running.network[node].mend(end)

    for prompt, future in asked:
        reply = future.result()
        assert reply.took_s < LIMIT_S and is_correct(running, prompt, reply), (reply, running.logs())
    ends = [(reply.error, len(reply.tokens)) for reply in (future.result() for future in long_ones)]
    assert ends == [("", LONG)] * 2, ends

    running.wait_until(lambda: running.all_ready() and running.idle(), f"{worker} back, and nothing left")
    before = running.workers()[worker][moved]

    def serves_again() -> bool:
        asked = [(prompt, running.stream(prompt, 8)) for prompt in PROMPTS]
        assert all(is_correct(running, prompt, future.result()) for prompt, future in asked), running.logs()
        return bool(running.workers()[worker][moved] > before)

    running.wait_until(serves_again, f"KV over the edges of {worker} again")
