"""torchrun under launch.torchrun: its command, how signals, failures and kills end it, and what it prints."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.process import children, descendants
from launch.agent import Job
from launch.torchrun import NOTICE_S, torchrun_command
from tests.support.launchers import Launcher
from tests.support.processes import wait_until_exited
from tests.support.topologies import free_ports

START = "p.die_with_parent(); import pathlib; pathlib.Path('up' + os.environ['RANK']).touch(); "
DRAINS = """
def drain(number, frame):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
"""


def test_command_is_torchruns_own_for_one_node_of_a_job() -> None:
    job = Job("prefill", ("--worker-id", "p-0", "--host", "h"), 2, 1, 4, "::1", 9000)
    words = " ".join(torchrun_command(job, 9000, Path("logs/p-0.1"))[1:])
    assert words == (
        "-m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 4 --max-restarts 0 --master-addr [::1] "
        "--master-port 9000 --rdzv-id p-0 --rdzv-conf timeout=600 --role p-0 --log-dir logs/p-0.1 --tee 3 "
        "-m prefill --worker-id p-0 --host h"
    )


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Starts launch.torchrun in a directory whose `decode.py` and `torch.py` must not be imported."""
    made: list[Launcher] = []
    for name in ("decode.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")

    def start(code: str, ranks: int = 1, *flags: str, **variables: str) -> Launcher:
        made.append(Launcher(tmp_path, code, ranks, flags, "launch.torchrun", **variables))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


def up(made: Launcher, ranks: int) -> list[int]:
    """Waits until the ranks run; returns their pids."""
    made.until(lambda: all((made.where / f"up{rank}").exists() for rank in range(ranks)))
    (torchrun,) = children(made.process.pid)
    return children(torchrun)


def test_first_signal_drains_the_ranks_and_their_output_is_in_logs_by_rank(torchrun: Any, tmp_path: Path) -> None:
    made = torchrun(DRAINS + "assert '' not in sys.path\n" + START + "time.sleep(600)", 2)
    up(made, 2)
    made.process.send_signal(signal.SIGTERM)
    assert made.ends() == 0, made.output
    assert "[w-0 rank 0] drained" in made.output and "[w-0 rank 1] drained" in made.output
    assert "Traceback" not in made.output and "SignalException" not in made.output
    logs = sorted((tmp_path / "logs" / "w-0").glob("*/attempt_0/*/stdout.log"))
    assert [log.read_text() for log in logs] == ["drained\n"] * 2


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_drain_the_ranks(torchrun: Any, number: int) -> None:
    made = torchrun(DRAINS + START + "time.sleep(600)")
    up(made, 1)
    made.process.send_signal(number)
    assert made.ends() == 0 and "drained" in made.output, made.output


def test_second_signal_kills_the_ranks(torchrun: Any) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    made = torchrun(code + START + "\nwhile True: time.sleep(1)")
    ranks = up(made, 1)
    made.process.send_signal(signal.SIGTERM)
    made.until(lambda: "asked" in made.output)
    made.process.send_signal(signal.SIGINT)
    assert made.ends() == 128 + signal.SIGINT, made.output
    wait_until_exited(ranks)


def test_recorded_error_is_in_torchruns_report_and_in_the_box_and_its_code_is_kept(torchrun: Any) -> None:
    made = torchrun("""
if os.environ["RANK"] == "0":
    time.sleep(600)
print("error: no tensor x", file=sys.stderr)
p.record_error("no tensor x")
sys.exit(3)
""", 2)  # fmt: skip
    assert made.ends() == 3, made.output
    line, report = made.output.index("[w-0 rank 1] error: no tensor x"), made.output.index("Traceback")
    assert line < report < made.output.index("traceback : no tensor x")
    assert "w-0 failed" in made.box and "rank 1 of 2" in made.box and "exit code 3 error no tensor x" in made.box
    assert made.output.rstrip().endswith("┘")


def test_rank_killed_without_a_reason_is_reported_in_one_line_at_the_end(torchrun: Any) -> None:
    made = torchrun("os.kill(os.getpid(), 9)")
    assert made.ends() == 1
    last = made.output.rstrip().splitlines()[-1]
    assert last.startswith(f"error: w-0 on {socket.gethostname()}: torchrun (node 0 of 1): exit code 1; no rank"), last
    assert "Signal 9 (SIGKILL) received by PID" in made.output


@pytest.mark.parametrize("victim", ["torchrun", pytest.param("launcher", marks=pytest.mark.long)])
def test_ranks_end_when_torchrun_or_its_launcher_is_killed(torchrun: Any, victim: str) -> None:
    made = torchrun(START + "time.sleep(600)", 2)
    up(made, 2)
    below = descendants(made.process.pid)
    if victim == "launcher":
        made.process.kill()
        made.process.wait()
    else:
        os.kill(children(made.process.pid)[0], signal.SIGKILL)
        assert made.ends() == 128 + signal.SIGKILL
        assert "torchrun (node 0 of 1): killed by SIGKILL" in made.output
    assert len(below) == 3
    wait_until_exited(below)


def test_node_that_waits_for_another_reports_it_and_ends_with_0_at_a_signal(torchrun: Any) -> None:
    (port,) = free_ports(1)
    made = torchrun(START, 1, "--nnodes", "2", "--master-port", str(port))
    made.until(lambda: "waits up to" in made.output)
    where = f"127.0.0.1 port {port} (NODE_RANK, NNODES, MASTER_ADDR, MASTER_PORT)"
    assert f"w-0: node 0 of 2 waits up to 600 s for the other nodes at {where}" in made.output and NOTICE_S == 10
    below = descendants(made.process.pid)
    made.process.terminate()
    assert made.ends() == 0, made.output
    wait_until_exited(below)


def test_port_in_use_ends_the_start_with_one_line(torchrun: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        made = torchrun("", 2, "--master-port", port)
        assert made.ends() == 3
    expected = (
        f"the ranks cannot rendezvous at 127.0.0.1 port {port} (MASTER_ADDR, MASTER_PORT): Address already in use"
    )
    assert made.output == f"error: the_rank cannot be started: {expected}\n"
