"""The agent of a worker: what it passes to its ranks, how it combines their exits, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.liveness import KILL_DELAY_S
from baton.runtime.process import children
from launch.agent import Job, first_failure, parse_job
from launch.plan import local_topology, make_plan
from launch.up_config import UpConfig
from tests.support.launchers import Launcher
from tests.support.processes import wait_until_exited

ROOT = Path(__file__).parents[2]
LOST = "rank 1 was silent for 4.2 s"


def test_agent_accepts_the_flags_of_torchrun() -> None:
    flags = "--nnodes 2 --node_rank=1 --nproc-per-node 4 --master-addr [::1] --master-port 9000 --max-restarts 0"
    job = parse_job([*flags.split(), "-m", "prefill", "--nnodes", "7", "-m", "x"])
    assert job == Job("prefill", ("--nnodes", "7", "-m", "x"), 2, 1, 4, "::1", 9000)
    assert parse_job(["-m", "decode"]) == Job("decode")
    assert job.environment(2, 9000) == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "9000",
    }


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--nnodes 0 -m x", "--nnodes: '0' must be a number of nodes, at least 1 (NNODES of the scripts)"),
        ("--nproc-per-node gpu -m x", "'gpu' must be a number of ranks, at least 1 (RANKS of the scripts)"),
        (
            "--nnodes 2 --node-rank 2 --master-port 1 -m x",
            "--node-rank (NODE_RANK) is 2: with 2 nodes the highest is 1",
        ),
        ("--nnodes 2 -m x", "a job over several nodes needs --master-addr and --master-port of node 0"),
        ("--max-restarts 3 -m x", "--max-restarts"),
        ("--rdzv-backend c10d -m x", "--rdzv-backend c10d: unsupported; for other torchrun flags use torchrun itself"),
        ("", "-m must name the program of the ranks"),
        ("x.py", "x.py: unsupported; for other torchrun flags"),
        ("-m --nnodes", "-m must name the program"),
    ],
)
def test_invalid_flags_are_refused_with_the_reason(flags: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_job(flags.split())
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_plan_and_scripts_pass_flags_that_the_agent_accepts() -> None:
    made = make_plan(local_topology(UpConfig(prefill_tp=2, decode_tp=1), [0, 1], ()), "/m", "m")
    assert [parse_job([*made.agent_flags(p), "-m", "x"]).ranks for p in made.parts] == [2, 1]
    for role in ("prefill", "decode"):
        environment = {"PATH": os.environ["PATH"], "PYTHON": "echo", "RANKS": "2"}
        script = ["bash", str(ROOT / "launch" / f"{role}.sh"), "--host", "h"]
        output = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, timeout=20).stdout
        assert parse_job(output.split()[2:]) == Job(role, ("--host", "h"), ranks=2)


def end(number: int, code: int, reason: str = "", hung: str = "") -> Any:
    return SimpleNamespace(number=number, returncode=code, reason=hung or reason, hung=hung)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([end(0, 4, LOST), end(1, -9, hung="it hung")], 0),
        ([end(0, 4, "lost the connection to rank 1"), end(1, -9)], 1),  # the kernel killed it
        ([end(1, -11), end(0, -9, hung="it hung")], 1),
        ([end(0, 4, "rank 1: bad"), end(1, 3, "bad")], 1),
        ([end(0, -15), end(1, -15, "it broke")], 1),
        ([end(1, -15), end(0, 4)], 1),
        ([end(0, -9, hung="it hung")], 0),
    ],
)
def test_failure_box_is_about_the_rank_that_caused_the_failure(ends: list[Any], first: int) -> None:
    assert first_failure(ends).number == first


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def start(code: str, ranks: int = 1, *flags: str, **variables: str) -> Launcher:
        made.append(Launcher(tmp_path, code, ranks, flags, **variables))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize(
    ("code", "expected", "shown"),
    [
        ("p.record_error('no tensor x'); p.record_error('and then'); sys.exit(3)", 3, "exit code 3 error no tensor x"),
        ("os.kill(os.getpid(), 9)", 128 + 9, "killed by SIGKILL error no reason recorded"),
        ("raise RuntimeError('it breaks')", 1, "exit code 1 error no reason recorded"),
        ("open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"mess'); sys.exit(1)", 1, "no reason recorded"),
        ("p.die_with_parent(); assert os.getsid(0) == os.getpid() and '' not in sys.path", 0, ""),
    ],
)
def test_agent_exits_with_the_code_of_its_rank_and_reports_the_reason(
    agent: Any, code: str, expected: int, shown: str
) -> None:
    made = agent(code)
    assert made.ends() == expected, made.output
    if shown:
        assert shown in made.box and "w-0 failed" in made.box and "started as the_rank, rank 0 of 1, pid" in made.box
        assert made.output.rstrip().endswith("┘")


def test_ranks_receive_a_rendezvous_address_and_rank_0_its_listening_socket(agent: Any) -> None:
    made = agent("""
import socket
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    listener = socket.socket(fileno=int(os.environ["BATON_STORE_FD"]))
    assert listener.getsockname() == where and where[0] == "127.0.0.1"
    listener.accept()[0].sendall(b"met")
else:
    assert "BATON_STORE_FD" not in os.environ and os.environ["OMP_NUM_THREADS"] == "1"
    assert socket.create_connection(where).recv(3) == b"met"
""", 2)  # fmt: skip
    assert made.ends() == 0, made.output


def test_rank_that_keeps_running_after_another_failed_is_killed(agent: Any) -> None:
    """It is not in the box: the rank that detected the failure reports the cause."""
    made = agent(f"""
if os.environ["RANK"] == "1":
    time.sleep(600)
p.record_error({LOST!r})
os._exit(4)
""", 2)  # fmt: skip
    began = time.monotonic()
    assert made.ends() == 4, made.output
    assert time.monotonic() - began >= KILL_DELAY_S
    assert "rank 0 of 2" in made.box and LOST in made.box and "ran out of memory" not in made.box


def test_rank_without_heartbeats_is_killed(agent: Any, tmp_path: Path) -> None:
    hasty = "import launch.agent as a, launch.child as c; c.AGENT_SILENCE_S = 2.0; a.main()"
    (tmp_path / "the_rank.py").write_text(
        "import baton.runtime.process as p, time; p.send_heartbeats(); time.sleep(600)"
    )
    words = [sys.executable, "-P", "-c", hasty, "-m", "the_rank"]
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    made = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not children(made.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (rank,) = children(made.pid)
        time.sleep(4.0)
        assert made.poll() is None, "it beats"
        os.kill(rank, signal.SIGSTOP)
        _, output = made.communicate(timeout=60)
        assert made.returncode == 128 + signal.SIGKILL and "hung: no heartbeat for 2 s" in output
    finally:  # the watch may be what failed
        for pid in (*children(made.pid), made.pid) if made.poll() is None else ():
            os.kill(pid, signal.SIGKILL)


DRAINS = """
def drain(number, frame):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print("runs", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_first_signal_drains_the_ranks(agent: Any, number: int) -> None:
    made = agent(DRAINS, 2)
    made.until(lambda: made.output.count("runs") == 2)
    made.process.send_signal(number)
    assert made.ends() == 0 and made.output.count("drained") == 2


def test_signal_while_ranks_load_ends_them_with_code_0(agent: Any) -> None:
    made = agent("print('runs', flush=True); time.sleep(600)")
    made.until(lambda: "runs" in made.output)
    made.process.terminate()
    assert made.ends() == 0 and not made.box


def test_second_signal_kills_the_ranks(agent: Any) -> None:
    made = agent("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('runs', flush=True); time.sleep(600)")
    made.until(lambda: "runs" in made.output)
    (rank,) = children(made.process.pid)
    made.process.terminate()
    time.sleep(0.5)
    assert made.process.poll() is None
    made.process.send_signal(signal.SIGINT)
    assert made.ends() == 128 + signal.SIGINT and not Path(f"/proc/{rank}").exists()


def test_child_processes_of_a_failed_rank_are_ended(agent: Any, tmp_path: Path) -> None:
    made = agent("import subprocess; print(subprocess.Popen(['sleep', '60']).pid, file=open('pid', 'w')); sys.exit(1)")
    assert made.ends() == 1
    wait_until_exited([int((tmp_path / "pid").read_text())])


def test_ranks_end_when_the_agent_is_killed(agent: Any) -> None:
    made = agent("p.die_with_parent(); print('runs', flush=True); time.sleep(600)", 2)
    made.until(lambda: made.output.count("runs") == 2)
    ranks = children(made.process.pid)
    made.process.kill()
    made.process.wait()
    wait_until_exited(ranks)


def test_port_in_use_is_named_in_the_error(agent: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        made = agent("", 2, "--master-port", port)
        assert made.ends() == 3
    assert f"the ranks cannot rendezvous at 127.0.0.1 port {port} (MASTER_ADDR, MASTER_PORT): Address" in made.output


def test_agent_loads_no_torch_and_opens_no_port_for_a_single_rank(agent: Any) -> None:
    made = agent("assert 'MASTER_PORT' not in os.environ; print('runs', flush=True); time.sleep(600)")
    made.until(lambda: "runs" in made.output)
    assert "libtorch" not in Path(f"/proc/{made.process.pid}/maps").read_text()
    found = [os.readlink(entry) for entry in Path(f"/proc/{made.process.pid}/fd").iterdir()]
    assert len([f for f in found if f.startswith("socket:")]) == 2  # the pair that wakes it at a signal
    made.process.terminate()
    assert made.ends() == 0
