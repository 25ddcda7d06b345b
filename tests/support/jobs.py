"""Workers as separate processes, each with an agent, for tests that start, signal and end them one by one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from baton.runtime.process import children
from tests.support.forks import start

AGENT = ("-m", "launch.agent")


class WorkerJob:
    """One worker: its agent, and its ranks as the agent's children."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.process, self._log = name, process, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        return children(self.process.pid)

    def terminate(self, pid: int | None = None, number: int = signal.SIGTERM) -> None:
        """Sends a signal to the agent, or to one of its ranks."""
        assert pid is None or pid in self.ranks()
        os.kill(pid or self.process.pid, number)

    async def wait_exit(self, timeout_s: float = 30.0) -> int:
        """Waits for the end of the agent; returns its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"{self.name} goes on\n{self.log}"
            await asyncio.sleep(0.02)
        return self.process.returncode


class Workers:
    """Workers of one model that dial the coordinator at `control`."""

    def __init__(self, where: Path, model: Path, control: str) -> None:
        self._where, self._model, self._control = where, model, control
        self.jobs: dict[str, WorkerJob] = {}

    def start(self, name: str, ranks: int = 1, **flags: object) -> WorkerJob:
        """`p...` is a prefill worker, `d...` a decode worker."""
        role = "prefill" if name[0] == "p" else "decode"
        settings = {
            "model": self._model,
            "coordinator": self._control,
            "worker_id": name,
            "threads": ranks,
            "dtype": "float32",
            **flags,
        }
        words = [*AGENT, "--nproc-per-node", str(ranks), "-m", role]
        for key, value in settings.items():
            flag = key.replace("_", "-")
            words += (
                [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
            )
        log = self._where / f"{name}-{len(self.jobs)}.log"
        with log.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = start([sys.executable, *words], stdout=file, stderr=file, env=environment)
        self.jobs[name] = job = WorkerJob(name, process, log)
        return job

    def logs(self) -> str:
        return "\n".join(f"--- {job.name}\n{job.log[-4000:]}" for job in self.jobs.values())


@contextlib.contextmanager
def workers(where: Path, model: Path, control: str) -> Iterator[Workers]:
    """Yields the workers; kills those that still run at the end."""
    made = Workers(where, model, control)
    try:
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        for job in made.jobs.values():
            job.process.kill()  # its ranks die with it
            job.process.wait(10)
