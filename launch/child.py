"""One run of one process: it has its own session, ends with the launcher, and records why it ends.

Everything that the launcher starts is a `Child`: the members of a cluster, the ranks of an agent, torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from baton.core.cores import ranges
from baton.core.errors import StartupError
from baton.core.liveness import AGENT_SILENCE_S, MAX_READ_GAP_S, ListeningClock
from baton.runtime.process import (
    ERROR_FILE_VARIABLE,
    HEARTBEAT_VARIABLE,
    PARENT_VARIABLE,
    descendants,
    kill_tree,
    set_death_signal,
)
from launch.failure import Failure

TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run."""

    name: str
    command: tuple[str, ...]
    # Its output is appended here; None: it has the launcher's.
    log: Path | None = None
    # Added to the launcher's own.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Empty: not pinned.
    cores: tuple[int, ...] = ()
    # Printed at each start.
    note: str = ""
    # File descriptors that it inherits.
    files: tuple[int, ...] = ()


class Child(subprocess.Popen[bytes]):
    """A running process. Must be created on the main thread: the kernel ties its death to the thread that forked it.

    Raises StartupError when it cannot be started, or its log cannot be opened.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        # Why the launcher killed it; empty if it did not.
        self.hung = ""
        try:
            # An unlinked file: it disappears with the processes, however they end.
            self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            ours, heartbeats = os.pipe()
        except OSError as error:
            raise StartupError(f"{spec.name} cannot be started: {error}") from None
        self._heartbeats: int | None = ours
        os.set_blocking(ours, False)
        # On the clock; None before the first: then its silence means nothing.
        self._last_heartbeat_at: float | None = None
        self._clock = ListeningClock(time.monotonic(), MAX_READ_GAP_S)
        # Where its output begins in the log.
        self._log_start = 0
        launcher, errors = os.getpid(), self._errors.fileno()
        reporting = {ERROR_FILE_VARIABLE: f"/dev/fd/{errors}", HEARTBEAT_VARIABLE: str(heartbeats)}
        always = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(launcher)}

        def before_exec() -> None:
            set_death_signal()
            if os.getppid() != launcher:
                os._exit(1)
            if spec.cores:
                os.sched_setaffinity(0, spec.cores)

        started = False
        try:
            with self._open_log() as log:
                super().__init__(
                    spec.command,
                    stdin=None if log is None else subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **reporting, **spec.environment, **always},
                    pass_fds=(errors, heartbeats, *spec.files),
                    start_new_session=True,
                    preexec_fn=before_exec,
                )
            started = True
        except OSError as error:
            raise StartupError(f"{spec.name} cannot be started: {error}") from None
        except subprocess.SubprocessError:  # from `before_exec`, where only pinning can fail
            where = f"cores {ranges(spec.cores)}"
            raise StartupError(f"{spec.name} cannot be started: it may not run on {where}") from None
        finally:
            os.close(heartbeats)
            if not started:  # it may be tried again and again
                os.close(ours)
                self._errors.close()

    def pids(self) -> set[int]:
        """Returns its pid and those of its descendants."""
        return {self.pid, *descendants(self.pid)}

    def watch(self, now: float) -> int | None:
        """Returns its exit code once it has ended; unless that is 0, processes that it started, such as a compiler, end
        too. Kills it if its heartbeats have stopped. Call it regularly: a longer gap between two calls counts as
        MAX_READ_GAP_S of silence, since the machine may have been suspended."""
        if self._heartbeats is None:
            return self.poll()
        listened = self._clock.advance(now)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._heartbeats, 512):
                self._last_heartbeat_at = listened
        code = self.poll()
        if code is not None:
            os.close(self._heartbeats)
            self._heartbeats = None
            if code != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGTERM)
        elif self._last_heartbeat_at is not None and listened - self._last_heartbeat_at >= AGENT_SILENCE_S:
            self.kill(0.0, f"hung: no heartbeat for {AGENT_SILENCE_S:g} s; its agent killed it")
        return code

    def kill(self, wait_s: float = 5.0, why: str = "") -> None:
        """Sends SIGKILL to it and its descendants unless it has already exited; then waits for its end."""
        if self.poll() is None:
            self.hung = self.hung or why
            kill_tree(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(wait_s)

    @property
    def reason(self) -> str:
        """Why the launcher killed it, or what it recorded with `baton.runtime.process.record_error`; else empty."""
        return self.hung or str(self._recorded().get("message", ""))

    @property
    def failure(self) -> Failure | None:
        """The failure that an agent recorded: of the rank that failed first."""
        about = self._recorded().get("extraInfo", {}).get("failure")
        return Failure(**about) if about else None

    def _recorded(self) -> Mapping[str, Any]:
        self._errors.seek(0)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return dict(json.loads(self._errors.read())["message"])
        return {}

    def tail(self) -> list[str]:
        """Returns the last lines that this run wrote to its log."""
        if self.spec.log is None:
            return []
        try:
            with self.spec.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                start = self._log_start if self._log_start <= size else 0  # it was truncated, by a rotation
                log.seek(max(start, size - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return []

    @contextlib.contextmanager
    def _open_log(self) -> Iterator[IO[bytes] | None]:
        if self.spec.log is None:
            yield None
            return
        try:
            log = self.spec.log.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"the log {self.spec.log} cannot be written: {error.strerror or error}") from None
        with log:
            with contextlib.suppress(OSError):  # a full disk loses the log but not the process
                log.write(f"$ {shlex.join(self.spec.command)}\n".encode("utf-8", "surrogateescape"))
            self._log_start = log.seek(0, os.SEEK_END)
            yield log
