"""README's torchrun commands and the scripts of launch/ on two nodes, network namespaces with the README's addresses:
tokens, signals, killed ranks and launchers, and what each side prints."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import baton.builtin
from baton.runtime.process import children
from tests.support import netns, oracle
from tests.support.client import body
from tests.support.limits import HANG_S
from tests.support.processes import has_exited
from tests.support.topologies import free_ports

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(reason := netns.missing()), reason=reason or "never"),
]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 120.0
LEFT_S = 10.0
"""Within this nothing may be left of a worker that ends."""
PROMPT = list(range(100, 150))
COUNT = 24
NAMES = {"coordinator": "coordinator", "--node-rank 0": "prefill-0", "--node-rank 1": "prefill-1", "decode": "decode"}


def readme_commands() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Returns the variables, and each command with the node on which the README runs it."""
    section = (ROOT / "README.md").read_text().split("### Several machines")[1].split("Instead, one topology")[0]
    section = section.replace("\\\n", "")
    variables = dict(re.findall(r"^    export (\w+)=(\S+)", section, re.MULTILINE))
    commands, node = [], ""
    for line in section.splitlines():
        if named := re.match(r"On (10\.0\.0\.\d)", line):
            node = named[1]
        elif line.startswith("    ") and not line.startswith("    export"):
            commands.append((node, line.strip()))
    return variables, commands


def script_commands() -> list[tuple[str, str]]:
    """The same processes, started by the scripts."""
    prefill = "NNODES=2 RANKS=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=9000 NODE_RANK={} {}/launch/prefill.sh"
    return [
        ("10.0.0.1", f"{ROOT}/launch/coordinator.sh --host 10.0.0.1 --control-host 10.0.0.1 # coordinator"),
        ("10.0.0.1", f"{prefill.format(0, ROOT)} --worker-id prefill-0 --host 10.0.0.1 # --node-rank 0"),
        ("10.0.0.2", f"{prefill.format(1, ROOT)} --worker-id prefill-0 --host 10.0.0.2 # --node-rank 1"),
        ("10.0.0.2", f"{ROOT}/launch/decode.sh --worker-id decode-0 --host 10.0.0.2 # decode"),
    ]


def c10d_commands() -> list[tuple[str, str]]:
    """README's commands with the other rendezvous: the nodes agree on their ranks, whatever their --node-rank."""
    static, c10d = "--master-addr 10.0.0.1 --master-port 9000", "--rdzv-backend c10d --rdzv-endpoint 10.0.0.1:9000"

    def changed(node: str, command: str) -> str:
        host = f"--rdzv-id prefill-0 --rdzv-conf is_host={int(node == '10.0.0.1')} --local-addr {node}"
        return command.replace(static, f"{c10d} {host}")

    return [(node, changed(node, command)) for node, command in readme_commands()[1]]


COMMANDS = {"README": lambda: readme_commands()[1], "scripts": script_commands, "c10d": c10d_commands}


class Nodes:
    """The processes of one cluster, `coordinator`, `prefill-0`, `prefill-1` and `decode`, each with a log."""

    def __init__(self, network: dict[str, netns.Node], where: Path, commands: list[tuple[str, str]]) -> None:
        self.network, self.where = network, where
        self.threads: ThreadPoolExecutor = network["10.0.0.1"].threads(8)
        token = where / "cluster.token"
        token.write_text("a secret of thirty-two characters and more\n")
        token.chmod(0o600)
        for name in ("decode.py", "prefill.py", "torch.py", "baton.py"):  # they may shadow nothing
            (where / name).write_text("raise SystemExit('shadowed')")
        variables, _ = readme_commands()
        variables["BATON_CLUSTER_TOKEN_FILE"] = variables["BATON_CLUSTER_TOKEN_FILE"].replace("$PWD", str(where))
        variables |= {"BATON_DTYPE": "float32", "BATON_KV_MEMORY_GIB": "0.05", "BATON_DRAFT": "none"}
        variables |= {"PYTHON": sys.executable}
        variables |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for node, command in commands:
            name = next(name for words, name in NAMES.items() if words in command)
            with (where / f"{name}.log").open("wb") as log:
                self.processes[name] = network[node].start(
                    ["bash", "-c", f"exec env {command}"],
                    cwd=where,
                    env={**os.environ, **variables},
                    stdout=log,
                    stderr=log,
                )

    def log(self, name: str) -> str:
        return (self.where / f"{name}.log").read_text(errors="replace")

    def get(self, path: str) -> Any:
        """Returns what the coordinator replies; None without a reply."""

        def get() -> Any:
            try:
                return httpx.get(f"http://10.0.0.1:8100{path}", timeout=5.0).json()
            except (httpx.HTTPError, ValueError):
                return None

        return self.threads.submit(get).result()

    def tokens(self) -> tuple[int, ...]:
        def post() -> tuple[int, ...]:
            sent = body(PROMPT, COUNT) | {"model": "builtin"}
            answer = httpx.post("http://10.0.0.1:8100/v1/completions", json=sent, timeout=HANG_S)
            assert answer.status_code == 200, answer.text
            return tuple(answer.json()["choices"][0]["token_ids"])

        return self.threads.submit(post).result()

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{self.logs()}"
            time.sleep(0.05)

    def wait_ready(self) -> None:
        def states() -> list[str]:
            return [w["state"] for w in (self.get("/workers") or {"workers": []})["workers"]]

        self.wait_until(lambda: states() == ["ready", "ready"], "two workers")

    def pids(self, name: str) -> list[int]:
        """Returns the pids of a launcher's torchrun and ranks, nearest first."""
        pid = self.processes[name].pid
        return [pid, *(below := children(pid)), *(rank for each in below for rank in children(each))]

    def send(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def ends(self, *names: str) -> tuple[int, ...]:
        """Waits until these launchers, and everything that they started, have ended; returns their exit codes."""
        self.wait_until(lambda: all(self.processes[name].poll() is not None for name in names), f"end of {names}")
        return tuple(self.processes[name].returncode for name in names)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-6000:]}" for name in self.processes)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Nodes]]:
    """Starts the cluster by README's commands, or by the scripts, and waits until it is ready."""
    with netns.nodes("10.0.0.1", "10.0.0.2", network="10.0.0") as network:
        made: list[Nodes] = []

        def begin(how: str) -> Nodes:
            made.append(Nodes(network, tmp_path, COMMANDS[how]()))
            made[0].wait_ready()
            return made[0]

        yield begin
        for nodes in made:
            nodes.threads.shutdown(wait=False, cancel_futures=True)
            report(tmp_path, nodes)


def report(where: Path, nodes: Nodes) -> None:
    """Copies the logs to $TORCHRUN_LOGS, from which benchmarks/results/torchrun.md quotes."""
    if target := os.environ.get("TORCHRUN_LOGS"):
        case = Path(target) / re.sub(r"\W+", "-", os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0])
        case.mkdir(parents=True, exist_ok=True)
        for name, process in nodes.processes.items():
            (case / f"{name}.log").write_text(f"{nodes.log(name)}\n[exit code {process.poll()}]\n")


WORKER = ("prefill-0", "prefill-1")
BOTH = [pytest.param("README"), pytest.param("scripts", marks=pytest.mark.long)]


def expect_nothing_left(nodes: Nodes, pids: list[int], began: float) -> None:
    nodes.wait_until(lambda: all(map(has_exited, pids)), "end of every process", LEFT_S - (time.monotonic() - began))


def rank_pids(nodes: Nodes) -> list[int]:
    (worker,) = (w for w in nodes.get("/workers")["workers"] if w["id"] == "prefill-0")
    return list(worker["pids"])


@pytest.mark.parametrize("how", BOTH)
def test_two_nodes_serve_the_reference_tokens_and_a_signal_at_one_drains_both(
    how: str, start: Callable[[str], Nodes]
) -> None:
    """Node 1 has only followers: the leader, on node 0, drains."""
    nodes = start(how)
    expected = oracle.greedy(Path(baton.builtin.__file__).parent / "target", PROMPT, COUNT)
    assert expected.decided == COUNT and nodes.tokens() == expected.tokens
    workers = {w["id"]: w for w in nodes.get("/workers")["workers"]}
    assert workers["prefill-0"]["tensor_parallel"] == 4 and workers["decode-0"]["kv_bytes_received"]
    left, began = [pid for name in WORKER for pid in nodes.pids(name)], time.monotonic()
    nodes.send("prefill-1", signal.SIGTERM)
    expect_nothing_left(nodes, left, began)
    clean = how == "scripts"
    assert nodes.ends(*WORKER) == (0, 0 if clean else 1), nodes.logs()
    assert re.search(r"signal at rank [23]: draining", nodes.log("prefill-0")), nodes.logs()
    assert "Traceback" not in nodes.log("prefill-0") and ("Traceback" in nodes.log("prefill-1")) is not clean
    nodes.send("coordinator", signal.SIGINT)
    assert nodes.ends("coordinator", "decode") == (0, 0), nodes.logs()
    assert "shadowed" not in nodes.logs()


@pytest.mark.long
def test_two_nodes_with_a_c10d_rendezvous_serve_the_reference_tokens(start: Callable[[str], Nodes]) -> None:
    nodes = start("c10d")
    assert any("--rdzv-backend c10d" in command for _, command in c10d_commands())
    expected = oracle.greedy(Path(baton.builtin.__file__).parent / "target", PROMPT, COUNT)
    assert nodes.tokens() == expected.tokens
    left, began = [pid for name in WORKER for pid in nodes.pids(name)], time.monotonic()
    nodes.send("coordinator", signal.SIGINT)
    expect_nothing_left(nodes, left, began)
    assert nodes.ends("coordinator", "decode", *WORKER) == (0, 0, 0, 0), nodes.logs()


@pytest.mark.long
@pytest.mark.parametrize("how", ["README", "scripts"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_leaders_node_drains_both(how: str, number: int, start: Callable[[str], Nodes]) -> None:
    nodes = start(how)
    left, began = [pid for name in WORKER for pid in nodes.pids(name)], time.monotonic()
    nodes.send("prefill-0", number)
    expect_nothing_left(nodes, left, began)
    assert nodes.ends(*WORKER) == (0 if how == "scripts" else 1, 0), nodes.logs()
    assert "INFO baton.worker: draining: 0 sequences" in nodes.log("prefill-0"), nodes.logs()
    assert "error: " not in nodes.log("prefill-0") + nodes.log("prefill-1")
    left, began = nodes.pids("decode"), time.monotonic()
    nodes.send("decode", number)
    expect_nothing_left(nodes, left, began)
    assert nodes.ends("decode") == (0 if how == "scripts" else 1,), nodes.logs()
    assert nodes.get("/live") is not None


@pytest.mark.long
@pytest.mark.parametrize("how", ["README", "scripts"])
def test_a_killed_rank_ends_both_nodes_and_one_line_names_it_before_the_traceback(
    how: str, start: Callable[[str], Nodes]
) -> None:
    nodes = start(how)
    left, began = [pid for name in WORKER for pid in nodes.pids(name)], time.monotonic()
    os.kill(rank_pids(nodes)[3], signal.SIGKILL)
    expect_nothing_left(nodes, left, began)
    codes = nodes.ends(*WORKER)
    assert 0 not in codes and (how == "README" or codes[0] == 4), nodes.logs()
    for name in WORKER:
        line, traceback = nodes.log(name).find("error: "), nodes.log(name).find("Traceback")
        assert -1 < line < traceback and "rank 3" in nodes.log(name)[line : line + 80], nodes.logs()
    assert nodes.get("/live") is not None and nodes.processes["decode"].poll() is None


@pytest.mark.long
@pytest.mark.parametrize("how", ["README", "scripts"])
@pytest.mark.parametrize("victim", WORKER)
def test_no_rank_is_left_after_a_torchrun_is_killed(how: str, victim: str, start: Callable[[str], Nodes]) -> None:
    nodes = start(how)
    left, began = [pid for name in WORKER for pid in nodes.pids(name)], time.monotonic()
    os.kill(nodes.pids(victim)[how == "scripts"], signal.SIGKILL)
    expect_nothing_left(nodes, left, began)
    assert 0 not in nodes.ends(*WORKER), nodes.logs()
    (other,) = set(WORKER) - {victim}
    line, traceback = nodes.log(other).find("error: "), nodes.log(other).find("Traceback")
    assert -1 < line < traceback, nodes.logs()


@pytest.mark.long  # tests/launch/test_torchrun.py has the report, test_tensor_parallel.py such a rank
def test_ranks_that_cannot_load_name_themselves_before_torchruns_traceback_and_in_its_report(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = f"--nproc-per-node 2 --master-port {port} --max-restarts 0 -m prefill --worker-id p-0 --model {tmp_path}/no"
    command = [str(BIN / "torchrun"), *words.split(), "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=tmp_path)
    assert done.returncode == 1
    line = re.search(rf"error: p-0, rank [01] of 2 on {re.escape(socket.gethostname())}: .*{tmp_path}/no", done.stderr)
    assert line and line.start() < done.stderr.index("Traceback"), done.stderr
    assert re.search(rf"traceback : .*{tmp_path}/no", done.stderr), done.stderr
