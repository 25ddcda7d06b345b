"""One life of one member: a child process in a session of its own, its output in a log file, dying with the launcher.

Where the process is the agent of a lone rank it outlives the rank: then the next life is one more rank of the same
agent (`launch.lives`), which has done the imports already.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from baton.core.errors import StartupError
from baton.process import PARENT_VARIABLE, descendants, set_death_signal
from launch.cores import ranges
from launch.failure import find_box
from launch.lives import ToAgent

TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `cores` empty means not pinned; `environment` is added to the launcher's own. `preload` names what
    an agent imports once for many lives; empty for a process of one life."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    preload: tuple[str, ...] = ()


class Child:
    """A life that runs. Must be made on the main thread: the kernel ties its death to the thread that forked it.

    With `before`, a life that is over, this one is in the same process if that rests and the specification is the same
    one; `reused` says whether it is. Otherwise what is left of `before` is killed.

    Raises StartupError when it cannot be started, or its log not be opened.
    """

    def __init__(self, spec: ChildSpec, before: Child | None = None) -> None:
        self.spec = spec
        self._code: int | None = None
        try:
            log = spec.log.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"the log {spec.log} cannot be written: {error.strerror or error}") from None
        with log:
            with contextlib.suppress(OSError):  # a full disk costs the log and not the process
                log.write(f"$ {shlex.join(spec.command)}\n".encode())
            self._log_start = log.seek(0, os.SEEK_END)
            again = before._again(spec, log.fileno()) if before else None
            self.reused = again is not None
            if before is not None and again is None:
                before.kill()
            self._process, self._agent = again or _start(spec, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def rests(self) -> bool:
        """This life is over, and its process waits to be asked for another."""
        return self.poll() is not None and self._process.poll() is None

    def fileno(self) -> int:
        """Becomes readable when this life is over and its process is not; -1 where there is no such thing."""
        return self._agent.fileno() if self._agent is not None and self._code is None else -1

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None and self._agent is not None:
            self._code = self._agent.ended()
        if self._code is None:
            self._code = self._process.poll()
        return self._code

    def pids(self) -> set[int]:
        """Itself and everything below it."""
        return {self.pid, *descendants(self.pid)}

    def terminate(self) -> None:
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self, wait_s: float = 5.0) -> None:
        """SIGKILL to it and everything below it, then reaps it."""
        if self._process.poll() is None:
            for pid in (*descendants(self.pid), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self._agent is not None:
            self._agent.close()

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines this life wrote."""
        return self._lines()[-lines:]

    def error_line(self) -> str | None:
        """The first `error: ...` this life wrote, without the word: the root cause comes before what it broke."""
        for line in self._lines():
            if line.startswith("error: "):
                return line.removeprefix("error: ").strip()
        return None

    def box(self) -> list[str]:
        """The box that an agent ended this life with, or nothing."""
        return find_box(self._lines())

    def _again(self, spec: ChildSpec, log: int) -> tuple[subprocess.Popen[bytes], ToAgent] | None:
        """The process of this life, which is over, in the next one."""
        if self._agent is not None and spec == self.spec and self.rests and self._agent.again(log):
            return self._process, self._agent
        return None

    def _lines(self) -> list[str]:
        try:
            with self.spec.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, log.tell() - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


def _start(spec: ChildSpec, log: IO[bytes]) -> tuple[subprocess.Popen[bytes], ToAgent | None]:
    launcher, cores = os.getpid(), spec.cores
    agent = ToAgent() if spec.preload and sys.platform == "linux" else None
    lives = agent.environment(spec.preload) if agent else {}

    def before_exec() -> None:
        set_death_signal()
        if os.getppid() != launcher:
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    with contextlib.ExitStack() as inherited, contextlib.ExitStack() as unless_started:
        if agent is not None:
            inherited.callback(agent.agents_end.close)
            unless_started.callback(agent.close)
        process = _popen(
            spec,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.environment, **lives, "PYTHONSAFEPATH": "1", PARENT_VARIABLE: str(launcher)},
            start_new_session=True,
            preexec_fn=before_exec,
            pass_fds=[agent.agents_end.fileno()] if agent else [],
        )
        unless_started.pop_all()
    return process, agent


def _popen(spec: ChildSpec, **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(spec.command, **options)
    except OSError as error:
        raise StartupError(f"{spec.name} cannot be started: {error}") from None
    except subprocess.SubprocessError:  # of what runs before exec; only pinning can fail there
        raise StartupError(f"{spec.name} cannot be started: it may not run on cores {ranges(spec.cores)}") from None
