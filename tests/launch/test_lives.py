"""One agent and the lives of its rank, as a supervisor's child: real processes, small ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.process import descendants
from launch.child import Child, ChildSpec
from launch.lives import PRELOAD_VARIABLE, SOCKET_VARIABLE, ToAgent, ToSupervisor

ROOT = Path(__file__).parents[2]
IMPORTED = "import os; VERSION, READ_BY = 1, os.getpid()\n"
RANK = """
import os, sys, time
from baton.process import die_with_parent, record_error
import imported
die_with_parent()
by_itself = imported.READ_BY == os.getpid()
# In one write: lines of several ranks stay whole, and nobody reads half of one.
os.write(1, f"pid: {os.getpid()} version {imported.VERSION} read by itself {by_itself}\\n".encode())
if FAIL:
    record_error("it failed for once")
    sys.exit(5)
time.sleep(60)
"""


class Member:
    """Makes one life after the other, with the log of each."""

    def __init__(self, where: Path, *flags: str, preload: tuple[str, ...] = ("imported",)) -> None:
        self.where, self.lives = where, list[Child]()
        command = (sys.executable, "-m", "launch.agent", *flags, "-m", "the_rank", "--worker-id", "w-0")
        environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{where}", "PYTHONUNBUFFERED": "1", "TMPDIR": str(where)}
        self.spec = ChildSpec("w-0", command, where / "w.log", environment, preload=preload)

    def live(self, spec: ChildSpec | None = None) -> Child:
        self.lives.append(Child(spec or self.spec, self.lives[-1] if self.lives else None))
        return self.lives[-1]

    def rank(self, life: Child) -> int:
        """Its pid, once it has said so."""
        until(lambda: "pid: " in self.said(life), f"a rank in {self.said(life)}")
        return int(self.said(life).partition("pid: ")[2].split()[0])

    def said(self, life: Child) -> str:
        return "\n".join(life.tail(100))

    def kill_rank(self, life: Child) -> None:
        """Waits until the end of that life is known."""
        os.kill(self.rank(life), signal.SIGKILL)
        until(lambda: life.poll() is not None, "the end of a life")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Member]]:
    if sys.platform != "linux":
        pytest.skip("an agent has many lives on Linux only")
    (tmp_path / "imported.py").write_text(IMPORTED)
    (tmp_path / "the_rank.py").write_text(RANK.replace("FAIL", "False"))
    made: list[Member] = []

    def member(*flags: str, **options: tuple[str, ...]) -> Member:
        made.append(Member(tmp_path, *flags, **options))
        return made[-1]

    yield member
    for one in made:
        pids = {pid for life in one.lives for pid in life.pids()}
        for life in one.lives:
            life.kill()
        until(lambda pids=pids: not [p for p in pids if alive(p)], "an end of everything")  # type: ignore[misc]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_next_life_is_another_fork_of_the_same_process(make: Callable[..., Member]) -> None:
    member = make()
    first = member.live()
    member.kill_rank(first)
    assert first.poll() == 128 + signal.SIGKILL and first.rests and first.box()
    second = member.live()
    assert second.reused and second.pid == first.pid and second.poll() is None
    rank = member.rank(second)
    assert descendants(second.pid) == [rank] and second.pids() == {second.pid, rank}
    assert "agent: life 2 of the_rank is a fork" in member.said(second)
    for life in (first, second):
        assert "version 1 read by itself False" in member.said(life)
    second.terminate()
    until(lambda: second.poll() is not None, "an end by SIGTERM")
    assert second.poll() == 0 and not second.rests


def test_a_reason_is_told_of_its_own_life_only(make: Callable[..., Member], tmp_path: Path) -> None:
    member = make()
    once = f"not os.path.exists({str(tmp_path / 'failed')!r})"
    (tmp_path / "the_rank.py").write_text(RANK.replace("FAIL", once))
    failed = member.live()
    until(lambda: failed.poll() is not None, "the end of a life")
    assert failed.poll() == 5 and "it failed for once" in "\n".join(failed.box())
    (tmp_path / "failed").touch()
    killed = member.live()
    assert killed.reused
    member.kill_rank(killed)
    assert "it failed for once" not in member.said(killed) and "it left no reason" in member.said(killed)


def test_each_life_writes_to_the_log_of_its_time(make: Callable[..., Member]) -> None:
    member = make()
    first = member.live()
    member.kill_rank(first)
    member.spec.log.rename(member.spec.log.with_suffix(".old"))
    second = member.live()
    assert second.reused and member.rank(second)
    assert member.spec.log.read_text().startswith("$ ")


def test_another_command_or_a_dead_agent_is_another_process(make: Callable[..., Member]) -> None:
    member = make()
    first = member.live()
    member.kill_rank(first)
    other = replace(member.spec, command=(*member.spec.command, "x"))
    second = member.live(other)
    assert not second.reused and second.pid != first.pid and not alive(first.pid)
    rank = member.rank(second)
    os.kill(second.pid, signal.SIGKILL)
    until(lambda: second.poll() is not None and not alive(rank), "an end of agent and rank")
    assert second.poll() == -signal.SIGKILL and not second.rests
    third = member.live(other)
    assert not third.reused and member.rank(third)


@pytest.mark.parametrize("wrong", ["import no_such_module", "raise SystemExit(3)"])
def test_a_failing_import_is_the_ranks_own(make: Callable[..., Member], tmp_path: Path, wrong: str) -> None:
    (tmp_path / "imported.py").write_text(wrong)
    member = make()
    life = member.live()
    until(lambda: life.poll() is not None, "the end of a life")
    assert life.poll() == (1 if "module" in wrong else 3) and "rank 0 of 1" in "\n".join(life.box())
    assert "agent: its rank imports for itself: " in member.said(life)
    (tmp_path / "imported.py").write_text(IMPORTED)
    again = member.live()
    assert again.reused and member.rank(again) and "read by itself True" in member.said(again)


def test_an_import_that_does_not_end_is_ended_by_a_signal(make: Callable[..., Member], tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("import time; print('stuck', flush=True); time.sleep(600)")
    member = make()
    life = member.live()
    until(lambda: "stuck" in member.said(life), "an import that hangs")
    life.terminate()
    until(lambda: life.poll() is not None, "an end by SIGTERM")
    assert life.poll() == 0 and not list(tmp_path.glob("baton-ranks*"))


def test_no_rank_is_started_for_who_asked_to_end_while_an_import_waits_for_a_child(
    make: Callable[..., Member], tmp_path: Path
) -> None:
    code = "import subprocess; c = subprocess.Popen(['sleep', '600']); print('waits', flush=True); c.wait()\n"
    (tmp_path / "imported.py").write_text(code + IMPORTED)
    member = make()
    life = member.live()
    until(lambda: "waits" in member.said(life), "an import that waits for a child")
    life.terminate()
    until(lambda: life.poll() is not None or "pid: " in member.said(life), "an end by SIGTERM")
    assert life.poll() == 0 and "pid: " not in member.said(life)
    assert not list(tmp_path.glob("baton-ranks*"))


def test_torchrun_is_not_begun_for_who_asked_to_end_before(tmp_path: Path) -> None:
    (tmp_path / "the_rank.py").write_text("print('pid: started')\n")
    code = """
import sys
from launch import agent
stopping = agent._Stopping()
stopping.asked = True
sys.argv = ["agent", "--nproc-per-node", "2", "--nnodes", "1", "-m", "the_rank"]
code = agent._torchrun(stopping)
stopping.clean()
print("ended with", code)
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "ended with 0" in done.stdout and "pid: " not in done.stdout, done.stderr
    assert not list(tmp_path.glob("baton-ranks*"))


def test_what_was_installed_meanwhile_is_imported(make: Callable[..., Member], tmp_path: Path) -> None:
    member = make()
    first = member.live()
    member.kill_rank(first)
    (tmp_path / "imported.py").write_text(IMPORTED.replace("VERSION, READ_BY = 1", "VERSION, READ_BY = 20"))
    second = member.live()
    assert second.reused and member.rank(second)
    assert "imported.py is another one than was imported" in member.said(second)
    assert "version 20 read by itself False" in member.said(second) and second.pid == first.pid
    member.kill_rank(second)
    third = member.live()
    assert third.reused and member.rank(third) and "importing anew" not in member.said(third)
    third.kill()


def test_a_job_of_torchruns_has_one_life(make: Callable[..., Member]) -> None:
    member = make("--nproc-per-node", "2")
    life = member.live()
    member.kill_rank(life)
    assert not life.rests and life.poll() == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="an agent has many lives on Linux only")
def test_what_cannot_be_started_leaves_no_file_open(tmp_path: Path) -> None:
    # In a process of its own: threads of others open files whenever they like.
    code = """
import os, sys
from pathlib import Path
from baton.core.errors import StartupError
from launch.child import Child, ChildSpec
where = Path(sys.argv[1])
spec = ChildSpec("w-0", (str(where / "no such program"),), where / "w.log", preload=("json",))
before = set(os.listdir("/proc/self/fd"))
try:
    Child(spec)
except StartupError as error:  # it keeps the locals of the failed call: nothing is left to the garbage collector
    print(error.message, "| left:", *set(os.listdir("/proc/self/fd")) - before)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "w-0 cannot be started" in done.stdout and done.stdout.endswith("| left:\n"), (done.stdout, done.stderr)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ToAgent, ToSupervisor]]:
    supervisor = ToAgent()
    environment = supervisor.environment(("a", "b"))
    environment[SOCKET_VARIABLE] = str(os.dup(supervisor.agents_end.fileno()))
    supervisor.agents_end.close()
    agent = ToSupervisor.inherited(environment)
    assert agent is not None and environment == {} and agent.preload == ("a", "b")
    yield supervisor, agent
    supervisor.close()
    agent._socket.close()


def test_nobody_asks(line: tuple[ToAgent, ToSupervisor]) -> None:
    supervisor, agent = line
    assert supervisor.ended() is None
    assert not agent.another(137, timeout_s=0.05)
    assert supervisor.ended() == 137 and supervisor.ended() is None


def test_nobody_is_there(line: tuple[ToAgent, ToSupervisor]) -> None:
    supervisor, agent = line
    agent._socket.close()
    with Path(os.devnull).open() as log:
        assert not supervisor.again(log.fileno())
    assert supervisor.ended() is None and supervisor.fileno() == -1


def test_the_supervisor_is_gone(line: tuple[ToAgent, ToSupervisor]) -> None:
    supervisor, agent = line
    supervisor.close()
    assert not agent.another(1, timeout_s=60.0)


def test_without_a_socket_there_is_one_life() -> None:
    assert ToSupervisor.inherited({PRELOAD_VARIABLE: "json"}) is None
