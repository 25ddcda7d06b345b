"""A process's duties to its parent: to end with it, even if the parent is killed with SIGKILL, and to report why it
ends. Also settings that must precede the start of libraries.

`start_child` starts a process for work that may hold the GIL, crash or never end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from baton.core.liveness import AGENT_HEARTBEAT_S

if TYPE_CHECKING:
    from concurrent.futures import Executor

PARENT_VARIABLE = "BATON_PARENT_PID"
"""Holds the pid of a child's parent, by which the child detects that the parent died before the child could check."""

EXIT_RANK_LOST = 4
"""The exit code of a rank that ended because another rank of its worker is lost."""

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file in which a rank records why it ends."""

HEARTBEAT_VARIABLE = "BATON_HEARTBEAT_FD"
"""Names the pipe to which a rank writes each second while it runs Python."""

FORWARD_VARIABLE = "BATON_FORWARDS_SIGNALS"
"""Set by `launch.torchrun`, which signals the ranks itself, so that torchrun does not end at the signal."""

SWITCH_INTERVAL_S = 0.0005
"""How long another thread may keep the event loop from running. Python's default is 5 ms, and a hand-over needs a
handful of such switches (decision 0018)."""

NAME_LOOKUP_S = 1
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent ends; exits immediately if the parent has already ended.

    `parent` is the pid of the process that started the caller; by default `BATON_PARENT_PID`, which the launcher and
    its agent set and which is removed from the environment here; under plain torchrun it is torchrun's pid. A process
    that was started by hand has no such parent and continues when the shell ends. Linux only; elsewhere it does
    nothing. Call it from the main thread, before any work.
    """
    named = os.environ.pop(PARENT_VARIABLE, "")
    if parent is None and named.isdigit():
        parent = int(named)
    if parent is None and under_torchrun():
        parent = os.getppid()
    if parent is None or sys.platform != "linux":
        return
    set_death_signal()
    if os.getppid() != parent:
        os._exit(1)


def under_torchrun() -> bool:
    """Whether torchrun, not the agent, started this rank; then the ranks of all nodes start together."""
    return _TORCHRUN_VARIABLE in os.environ


def drain_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals at which a rank drains: SIGTERM, and under torchrun all that it forwards to its ranks."""
    forwarded = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if under_torchrun() else ()
    return (signal.SIGTERM, *forwarded)


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files to `count`, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def limit_name_lookups() -> None:
    """Limits name lookups to one attempt of 1 s. Every connection of a torch store looks up an address's name for log
    lines, and a server that drops one query would stall the connection for 5 s, as long as an edge may take."""
    os.environ.setdefault("RES_OPTIONS", f"timeout:{NAME_LOOKUP_S} attempts:1")


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Excludes what is imported in the block from garbage collection, during and after it, as it is never freed.
    Collecting it repeatedly takes a tenth to a sixth of the time of importing torch, and 100 ms per full collection."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def record_error(message: str, **about: object) -> None:
    """Records why this process ends in the file that its launcher (or torchrun) reads. Only the first reason is kept:
    later ones are its consequences."""
    path = os.environ.get(ERROR_FILE_VARIABLE, "")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    extra = {"rank": os.environ.get("RANK", "0"), "timestamp": str(int(time.time())), **about}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def send_heartbeats() -> None:
    """Starts a thread that reports to the agent each second that this process runs, so that the agent detects a blocked
    interpreter or a stopped process. Without an agent it does nothing."""
    named = os.environ.pop(HEARTBEAT_VARIABLE, "")
    if not named.isdigit():
        return
    pipe = int(named)
    os.set_inheritable(pipe, False)

    def beat() -> None:
        with contextlib.suppress(OSError):  # the agent has ended, and this process is about to
            while True:
                os.write(pipe, b".")
                time.sleep(AGENT_HEARTBEAT_S)

    threading.Thread(target=beat, name="beat", daemon=True).start()


def set_death_signal() -> None:
    """Makes the kernel send SIGKILL when the parent ends. Safe between fork and exec; it survives exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Returns the running processes below `pid`, nearest first. A worker runs in its own session, so signals to a
    process group do not reach it."""
    pids = [pid]
    for one in pids:  # grows during the loop
        pids += children(one)
    return pids[1:]


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process and all its descendants."""
    for one in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Returns the running processes that `pid` started itself."""
    pids: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                pids += map(int, file.read().split())
    return pids


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


NICE = 10
"""Large bodies and grammars yield to the streams of other clients when CPU time is scarce."""


def start_child(prepare: Callable[..., object] | None = None, *arguments: Any, nice: int = NICE) -> Executor:
    """An executor of one process, which calls `prepare(*arguments)` before it yields by `nice`: what that imports would
    take a process without priority longer than callers wait, where no core is idle."""
    from concurrent.futures import ProcessPoolExecutor  # here: most processes have no such child
    from multiprocessing import get_context

    return ProcessPoolExecutor(
        1, get_context("spawn"), initializer=_begin, initargs=(os.getpid(), nice, prepare, arguments)
    )


class ChildExecutor:
    """A slot for a child. State: its executor, from the first work item until it is killed; the next one starts
    another."""

    def __init__(self, start: Callable[[], Executor]) -> None:
        self._start = start
        self.executor: Executor | None = None

    def started(self) -> Executor:
        executor = self.executor
        if executor is None:
            executor = self.executor = self._start()
        return executor

    def close(self) -> None:
        """Kills the child, even if it is busy."""
        executor, self.executor = self.executor, None
        if executor is not None:
            kill_child(executor)


def kill_child(executor: Executor) -> None:
    """Kills a child, even if it is busy. Callers that wait for it get BrokenProcessPool."""
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False)
    for process in processes:
        process.kill()


def ready() -> None:
    """An empty work item: it completes once the child has started."""


def _begin(parent: int, nice: int, prepare: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if prepare is not None:
        prepare(*arguments)
    os.nice(nice)
