"""A whole cluster for a test, started the way a user starts it: `baton up` as a subprocess; its processes are forked
where they can be (tests/support/forks.py).

    with cluster(model_dir, exact=True, prefill=2) as running:
        httpx.get(running.url + "/ready")
        running.kill(running.pids("decode-0")[0])

Flags are those of `baton up` with underscores. Everything listens on free loopback ports. Leaving the block stops the
cluster with SIGINT and asserts that it exits with 0 and that no process of it remains; `stop(expect=None)` skips the
check of the exit code. If the block raises, the logs are printed, so that pytest shows them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import StartupError
from launch.cluster_api import get_cluster
from tests.support.forks import start

MARKER = "BATON_TEST_CLUSTER"
READY_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_CHARS = 6000
BATON = (sys.executable, "-m", "launch.cli", "up")


@dataclass
class Cluster:
    """A running `baton up`. `url`, `grpc` and `control` are set once it is ready, `admin` if operators have an address
    of their own."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    marker: str
    url: str = ""
    grpc: str = ""
    control: str = ""
    admin: str = ""

    def workers(self) -> dict[str, dict[str, Any]]:
        """Returns the rows of GET /workers by worker id."""
        return {row["id"]: row for row in get_cluster(self.admin or self.url, timeout_s=10.0).workers}

    def pids(self, worker: str) -> list[int]:
        """Returns the pid of each rank, as reported by the worker."""
        return [int(pid) for pid in self.workers()[worker]["pids"]]

    def coordinator_pid(self) -> int:
        return self._pid_of("coordinator")

    def batches_pid(self) -> int:
        return self._pid_of("batches")

    def _pid_of(self, member: str) -> int:
        ready_file = f"/{member}.json"
        return next(pid for pid in self.processes() if any(word.endswith(ready_file) for word in command_line(pid)))

    def processes(self) -> list[int]:
        """Returns every running process that the cluster started, including the launcher."""
        return [pid for pid in _all_pids() if self.runs(pid)]

    def kill(self, pid: int, sig: int = signal.SIGKILL) -> None:
        """Sends a signal to a process of this cluster, and to no other."""
        assert self.runs(pid), f"process {pid} is not of this cluster"
        os.kill(pid, sig)

    def wait_until(self, condition: Callable[[Cluster], bool], what: str, timeout_s: float = 30.0) -> None:
        """Polls; fails with the logs after `timeout_s`. While the coordinator is down the condition counts as false."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, StartupError, KeyError):
                if condition(self):
                    return
            if self.process.poll() is not None:
                raise AssertionError(f"`baton up` ended while waiting for {what}\n{self.logs()}")
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout_s:g} s\n{self.logs()}")

    def logs(self) -> str:
        """Returns the ends of the launcher's output and of every log file."""
        parts = [self.output, *sorted(self.run_dir.glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in parts if path.exists())

    def stop(self, expect: int | None = 0, sig: int = signal.SIGINT) -> None:
        """Stops the cluster and asserts that no process remains. Has no effect the second time."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logs = self.logs()
            self.destroy()
            raise AssertionError(f"`baton up` did not end within {STOP_TIMEOUT_S:g} s of a signal\n{logs}") from None
        deadline = time.monotonic() + 5.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        described = [f"{pid}: {command_line(pid)}" for pid in left]
        self.destroy()
        assert not described, f"processes left running: {described}\n{self.logs()}"
        assert expect is None or code == expect, f"`baton up` ended with {code}, not {expect}\n{self.logs()}"

    def destroy(self) -> None:
        """Sends SIGKILL to the remaining processes; asserts nothing."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)

    def runs(self, pid: int) -> bool:
        """Whether a process runs and is of this cluster."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return f"{MARKER}={self.marker}".encode() in environment.split(b"\0") and state != "Z"


def start_cluster(
    model: Path | str,
    *,
    run_dir: Path,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = BATON,
    forked: bool = True,
    **flags: object,
) -> Cluster:
    """Starts `baton up` without waiting; call `wait_ready`, and `stop` at the end. Unless `forked`, each process
    imports what it needs."""
    run_dir.mkdir(parents=True, exist_ok=True)
    output, marker = run_dir / "up.out", uuid.uuid4().hex
    settings = {"port": 0, "grpc_port": 0, "drain_timeout_s": 10.0, "batches": "data_dir" in flags, **flags}
    command = [*program, "--model", str(model), "--run-dir", str(run_dir)]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        command += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    environment = {**os.environ, **(env or {}), MARKER: marker}
    with output.open("wb") as file:
        process = (start if forked else subprocess.Popen)(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Cluster(process, run_dir, output, marker)


def wait_ready(running: Cluster, timeout_s: float = READY_TIMEOUT_S) -> Cluster:
    """Waits until `baton up` is ready; fails with the logs."""
    file = running.run_dir / "cluster.json"
    running.wait_until(lambda _: file.exists(), "ready cluster", timeout_s)
    known = json.loads(file.read_text())
    running.url, running.grpc, running.control = known["url"], known["grpc"], known["control"]
    running.admin = known.get("admin", "")
    return running


@contextlib.contextmanager
def cluster(
    model: Path | str,
    *,
    env: Mapping[str, str] | None = None,
    run_dir: Path | None = None,
    ready_timeout_s: float = READY_TIMEOUT_S,
    **flags: object,
) -> Iterator[Cluster]:
    """Yields a ready cluster. Its logs are kept in `run_dir`, if given, and otherwise deleted with it."""
    with contextlib.ExitStack() as stack:
        if run_dir is None:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-test-")))
        running = start_cluster(model, run_dir=run_dir, env=env, **flags)
        try:
            yield wait_ready(running, ready_timeout_s)
        except BaseException:
            print(running.logs())
            running.destroy()
            raise
        running.stop()


def command_line(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if word]
    except OSError:
        return []


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
