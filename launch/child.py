"""One run of one member: a child process in its own session that logs to a file and dies with the launcher."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.errors import StartupError
from baton.runtime.process import PARENT_VARIABLE, descendants, kill_tree, set_death_signal
from launch.cores import ranges
from launch.failure import find_box

TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024
_ERROR = "error: "


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `cores` empty means not pinned; `environment` is added to the launcher's own; `note` is printed at
    each start."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    note: str = ""


class Child(subprocess.Popen[bytes]):
    """A running process. Must be created on the main thread: the kernel ties its death to the thread that forked it.

    Raises StartupError when it cannot be started, or its log cannot be opened.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        launcher = os.getpid()
        always = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(launcher)}

        def before_exec() -> None:
            set_death_signal()
            if os.getppid() != launcher:
                os._exit(1)
            if spec.cores:
                os.sched_setaffinity(0, spec.cores)

        try:
            log = spec.log.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"the log {spec.log} cannot be written: {error.strerror or error}") from None
        with log:
            with contextlib.suppress(OSError):  # a full disk loses the log but not the process
                log.write(f"$ {shlex.join(spec.command)}\n".encode("utf-8", "surrogateescape"))
            self._log_start = log.seek(0, os.SEEK_END)
            try:
                super().__init__(
                    spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **spec.environment, **always},
                    start_new_session=True,
                    preexec_fn=before_exec,
                )
            except OSError as error:
                raise StartupError(f"{spec.name} cannot be started: {error}") from None
            except subprocess.SubprocessError:  # from `before_exec`, where only pinning can fail
                where = f"cores {ranges(spec.cores)}"
                raise StartupError(f"{spec.name} cannot be started: it may not run on {where}") from None

    def pids(self) -> set[int]:
        """Returns its pid and those of its descendants."""
        return {self.pid, *descendants(self.pid)}

    def kill(self, wait_s: float = 5.0) -> None:
        """Sends SIGKILL to it and its descendants unless it has already exited; then reaps it."""
        if self.poll() is None:
            kill_tree(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(wait_s)

    def tail(self) -> list[str]:
        """Returns the last lines that this run wrote."""
        return self._lines()[-TAIL_LINES:]

    def error_line(self) -> str:
        """Returns the first `error: ...` that this run wrote, without the prefix: the root cause precedes its
        consequences. Empty without one."""
        return next((line[len(_ERROR) :].strip() for line in self._lines() if line.startswith(_ERROR)), "")

    def box(self) -> list[str]:
        """Returns the box with which an agent ended this run, or nothing."""
        return find_box(self._lines())

    def _lines(self) -> list[str]:
        try:
            with self.spec.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, log.tell() - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
