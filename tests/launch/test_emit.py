"""Scripts that `baton emit` writes: their text, and that they start a cluster that serves requests."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import launch.agent
from launch.cli import baton
from launch.emit import emit_shell, emit_slurm
from launch.plan import make_plan
from launch.topology import parse_topology
from tests.support.checkpoints import make_checkpoint
from tests.support.topologies import free_ports, loopback_topology

GOLDEN = Path(__file__).parent / "golden"


def test_slurm_script_equals_the_golden_file(tmp_path: Path) -> None:
    text = emit_slurm(make_plan(parse_topology(tomllib.loads((GOLDEN / "cluster.toml").read_text())), "/models/m", "m"))
    assert text == (GOLDEN / "cluster.sbatch").read_text()
    (tmp_path / "s").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "s")], check=True, timeout=20)
    assert sys.executable not in text and not any(f"10.0.0.{n}" in text for n in range(4))


def test_shell_scripts_are_valid_bash_without_a_local_interpreter_path(tmp_path: Path) -> None:
    plan = make_plan(parse_topology(tomllib.loads((GOLDEN / "cluster.toml").read_text())), "/models/m", "m")
    texts = {node.name: emit_shell(plan, node) for node in plan.topology.nodes}
    assert "-m coordinator" in texts["front"] and "taskset -c 0-7 " in texts["b"] and texts["idle"] == ""
    for text in filter(None, texts.values()):
        (tmp_path / "s").write_text(text)
        subprocess.run(["bash", "-n", str(tmp_path / "s")], check=True, timeout=20)
        assert sys.executable not in text


@pytest.mark.parametrize("form", ["shell", "slurm"])
def test_emit_refuses_a_plan_that_up_refuses_and_writes_no_files(form: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "llama")
    topology = loopback_topology(tmp_path / "t.toml", model)
    topology.write_text(topology.read_text() + "tensor_parallel = 3\n")
    out = ["--out", str(tmp_path / "nodes")] if form == "shell" else []
    done = CliRunner().invoke(baton, ["emit", form, str(topology), *out])
    assert "decode-0" in str(done.exception) and "cannot be divided over 3" in str(done.exception)
    assert not (tmp_path / "nodes").exists() and "#!" not in done.output


def test_shell_metacharacters_are_quoted_and_slurm_addresses_are_expanded() -> None:
    tables = tomllib.loads((GOLDEN / "cluster.toml").read_text())
    plan = make_plan(parse_topology(tables), "/models/m", "$(id) @0@ 'x'")
    text = emit_slurm(plan)
    line = next(line for line in text.splitlines() if "-m coordinator" in line)
    words = shlex.split(line)
    assert words[words.index("--served-model-name") + 1] == "$(id) @0@ 'x'"
    assert '--control-host "${ADDRESS[0]}"' in line


class Scripts:
    """Scripts that run in the background; those still running at the end are killed."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, script: Path, **environment: str) -> subprocess.Popen[bytes]:
        found = {**os.environ, "PYTHON": sys.executable, "LOGS": str(self.where / "logs"), **environment}
        with (self.where / f"{script.name}.out").open("wb") as out:
            process = subprocess.Popen(["bash", str(script)], stdout=out, stderr=out, env=found, start_new_session=True)
        self.running.append(process)
        return process

    def logs(self) -> str:
        paths = [*self.where.glob("*.out"), *(self.where / "logs").glob("*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def answer(self, port: int) -> httpx.Response:
        deadline = time.monotonic() + 90
        body = {"model": "m", "prompt": [30, 31, 32], "max_tokens": 4, "temperature": 0}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            while time.monotonic() < deadline:
                try:
                    if client.get("/ready").status_code == 200:
                        return client.post("/v1/completions", json=body)
                except httpx.TransportError:
                    pass
                assert all(process.poll() is None for process in self.running), self.logs()
                time.sleep(0.1)
        raise AssertionError(f"not ready\n{self.logs()}")


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    started = Scripts(tmp_path)
    yield started
    for process in started.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def port_of(topology: Path) -> int:
    return int(tomllib.loads(topology.read_text())["coordinator"]["port"])


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])  # pods of test_kubernetes.py have two
def test_shell_scripts_of_two_nodes_serve_a_request_and_drain(ranks: int, tmp_path: Path, scripts: Scripts) -> None:
    """The prefill worker has one rank on each node, or one alone."""
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"), tensor_parallel=ranks)
    done = CliRunner().invoke(baton, ["emit", "shell", str(topology), "--out", str(tmp_path / "nodes")])
    assert [Path(line).name for line in done.output.splitlines()] == ["a.sh", "b.sh"]
    first, second = (scripts.start(tmp_path / "nodes" / name) for name in ("a.sh", "b.sh"))
    answer = scripts.answer(port_of(topology))
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    first.send_signal(signal.SIGTERM)  # the coordinator drains the workers of both nodes
    assert (first.wait(40), second.wait(40)) == (0, 0), scripts.logs()


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A fake Slurm of two small scripts: `scontrol` lists the two hosts of the allocation, `srun` runs a step locally,
    once for each host that it names."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/bash\n[ "$*" = "show hostnames x" ] && printf "127.0.0.1\\n127.0.0.2\\n"\n')
    (tools / "srun").write_text(
        "#!/bin/bash\n"
        "while [[ $1 == --* ]]; do\n"
        "  case $1 in --output=*) log=${1#*=};; --nodelist=*) hosts=${1#*=};; esac\n"
        "  shift\n"
        "done\n"
        "pids=() node=0\n"
        "for host in ${hosts//,/ }; do\n"
        '  SLURM_NODEID=$node SLURMD_NODENAME=$host "$@" >>"$log" 2>&1 &\n'
        "  pids+=($!) node=$((node + 1))\n"
        "done\n"
        "trap 'kill -TERM \"${pids[@]}\"' TERM\n"
        "code=0\n"
        "for pid in ${pids[@]}; do\n"
        "  wait $pid || code=$?\n"
        "  while kill -0 $pid 2>/dev/null; do wait $pid && code=0 || code=$?; done\n"
        "done\n"
        "exit $code\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x"}


@pytest.mark.cluster
@pytest.mark.long  # played with a fake interpreter below
def test_the_emitted_slurm_script_serves_a_request(tmp_path: Path, scripts: Scripts, slurm: dict[str, str]) -> None:
    topology = loopback_topology(tmp_path / "t.toml", make_checkpoint(tmp_path / "m", "llama"))
    (tmp_path / "job.sbatch").write_text(CliRunner().invoke(baton, ["emit", "slurm", str(topology)]).output)
    job = scripts.start(tmp_path / "job.sbatch", **slurm)
    answer = scripts.answer(port_of(topology))
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    job.send_signal(signal.SIGTERM)
    assert job.wait(40) == 0, scripts.logs()


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize(("launcher", "nodes_per_worker"), [("torchrun", 1), ("torchrun", 2), ("agent", 1)])
def test_the_slurm_script_beside_the_package_serves_a_request(
    launcher: str, nodes_per_worker: int, tmp_path: Path, scripts: Scripts, slurm: dict[str, str]
) -> None:
    script = Path(launch.agent.__file__).parent / "slurm.sbatch"
    hosts = "".join(f"127.0.0.{n}\\n" for n in range(1, 1 + 2 * nodes_per_worker))
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/bash\nprintf '{hosts}'\n")
    model, port = make_checkpoint(tmp_path / "m", "llama"), free_ports(1)[0]
    set_by_hand = {"MODEL": str(model), "PORT": str(port), "OPTIONS": "--dtype float32 --device cpu"}
    set_by_hand |= {"LAUNCHER": launcher, "NODES_PER_WORKER": str(nodes_per_worker)}
    job = scripts.start(script, **slurm, **set_by_hand)
    answer = scripts.answer(port)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    by_rank = list((tmp_path / "logs").glob("decode-0*/*/attempt_0/0/stderr.log"))
    assert len(by_rank) == (nodes_per_worker if launcher == "torchrun" else 0)
    job.send_signal(signal.SIGTERM)
    assert job.wait(40) == 0, scripts.logs()
    if nodes_per_worker > 1:
        return
    wrong = scripts.start(script, **slurm, MODEL=str(model), PORT=str(port), PREFILL="3")
    assert wrong.wait(20) == 3 and "need --nodes=4, not 2" in scripts.logs()


INTERPRETER = """#!/bin/bash
# Python, played: a coordinator that ends with $FAKE_CODE once the workers are up, workers that end at a SIGTERM.
if [[ "$*" == "-m coordinator "* ]]; then
  until grep -qs up "$LOGS/prefill-0.log" && grep -qs up "$LOGS/decode-0.log"; do sleep 0.05; done
  echo ends
  exit "$FAKE_CODE"
fi
trap 'echo terminated; exit 0' TERM
echo "up on ${SRUN_CPUS_PER_TASK:-} cores"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""
TOPOLOGY = """
model = "/models/m"
[coordinator]
node = "a"
[[nodes]]
cores = 2
name = "a"
address = "127.0.0.1"
[[nodes]]
cores = 2
name = "b"
address = "127.0.0.2"
[[prefill]]
node = "a"
[[decode]]
node = "a"
"""
EMITTED = ["shell", "slurm", "slurm.sbatch"]
SCRIPTS = [*EMITTED, "prefill.sh", "decode.sh"]


@pytest.fixture
def start_emitted(tmp_path: Path, slurm: dict[str, str], scripts: Scripts) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts one of `EMITTED` with a fake interpreter and a fake getent that resolves 127.* only."""
    for name, text in (
        ("python", INTERPRETER),
        ("getent", '#!/bin/bash\n[[ $2 == 127.* ]] && echo "$2 STREAM" || exit 2\n'),
    ):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    plan = make_plan(parse_topology(tomllib.loads(TOPOLOGY)), "/models/m", "m")
    texts = {"shell": emit_shell(plan, plan.topology.node("a")), "slurm": emit_slurm(plan)}

    def start(which: str, code: int = 0, **variables: str) -> subprocess.Popen[bytes]:
        package, script = tmp_path / "package", tmp_path / which
        shutil.copytree(Path(launch.agent.__file__).parent, package, ignore=shutil.ignore_patterns("*.py"))
        script.write_text(texts[which] if which in texts else (package / which).read_text())
        changed = 0
        for path in (script, package / "members.sh"):  # so that no worker is ended after a clean exit
            changed += (text := path.read_text()).count("? 0 : 10")
            path.write_text(text.replace("? 0 : 10", "? 0 : 600"))
        assert changed == 1 + (which in texts)
        played = {"PYTHON": str(tmp_path / "bin" / "python"), "FAKE_CODE": str(code), "BATON": str(package)}
        return scripts.start(script, **slurm, **played, MODEL="/models/m", **variables)

    return start


@pytest.mark.parametrize("which", SCRIPTS)
def test_unknown_launcher_is_refused(
    which: str, tmp_path: Path, start_emitted: Callable[..., subprocess.Popen[bytes]]
) -> None:
    script = start_emitted(which, LAUNCHER="slurm")
    assert script.wait(30) == 2
    assert (tmp_path / f"{which}.out").read_text() == "error: LAUNCHER is slurm; it must be torchrun or agent\n"


@pytest.mark.parametrize("which", EMITTED)
def test_coordinator_failure_is_reported_and_its_workers_end(
    which: str, tmp_path: Path, start_emitted: Callable[..., subprocess.Popen[bytes]]
) -> None:
    script, logs = start_emitted(which, code=3, SLURM_CPUS_PER_TASK="5"), tmp_path / "logs"
    assert script.wait(30) == 3
    assert (
        tmp_path / f"{which}.out"
    ).read_text() == f"error: coordinator ended with code 3; its log is {logs / 'coordinator.log'}\n"
    texts = [(logs / f"{role}-0.log").read_text() for role in ("prefill", "decode")]
    assert all("terminated" in text for text in texts)
    if which == "slurm.sbatch":  # which has no option of srun for it
        assert all("up on 5 cores" in text for text in texts)


@pytest.mark.parametrize("which", EMITTED)
def test_signal_ends_the_workers_after_the_coordinator_has_ended(
    which: str, tmp_path: Path, start_emitted: Callable[..., subprocess.Popen[bytes]]
) -> None:
    script, log, deadline = start_emitted(which), tmp_path / "logs" / "coordinator.log", time.monotonic() + 30
    while not log.exists() or "ends" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while script.poll() is None:
        script.send_signal(signal.SIGTERM)
        assert time.monotonic() < deadline, "it waits for workers that nobody told to end"
        time.sleep(0.3)
    assert script.returncode == 0


@pytest.mark.parametrize("which", EMITTED[1:])
def test_host_without_an_ipv4_address_is_reported(
    which: str, tmp_path: Path, start_emitted: Callable[..., subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "bin" / "scontrol").write_text('#!/bin/bash\nprintf "127.0.0.1\\nnode7\\n"\n')
    script = start_emitted(which)
    assert script.wait(30) == 3 and not list((tmp_path / "logs").iterdir())
    assert "error: host node7 of this allocation has no IPv4 address" in (tmp_path / f"{which}.out").read_text()
