"""What a process owes its parent, to die with it even when the parent is killed with SIGKILL and to say why; and what
it sets before its libraries start."""

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
from collections.abc import Iterator

PARENT_VARIABLE = "BATON_PARENT_PID"
"""Names the parent a child was started by, so that the child sees it even if the parent died before it could look."""

EXIT_RANK_LOST = 4
"""The exit code of a rank that ended because another rank of its worker is gone."""

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file that a rank leaves the reason of its end in."""

BEAT_VARIABLE = "BATON_BEAT_FD"
"""Names the pipe that a rank writes to each second for as long as it runs Python."""

SWITCH_INTERVAL_S = 0.0005
"""How long another thread may keep the event loop from running. Python's default is 5 ms, and a hand-over is a handful
of such turns (decision 0005)."""

BEAT_S = 1.0
NAME_LOOKUP_S = 1
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when its parent ends; when the parent is gone already, it exits now.

    `parent` is the pid the caller was started by; by default `BATON_PARENT_PID`, which the launcher and its agent set
    and which is taken out of the environment here; under plain torchrun it is torchrun. A process that somebody
    started by hand has no such parent and goes on when the shell ends. Linux only; elsewhere it does nothing. Call it
    from the main thread, before any work.
    """
    named = os.environ.pop(PARENT_VARIABLE, "")
    if parent is None and named.isdigit():
        parent = int(named)
    if parent is None and _TORCHRUN_VARIABLE in os.environ:
        parent = os.getppid()
    if parent is None or sys.platform != "linux":
        return
    set_death_signal()
    if os.getppid() != parent:
        os._exit(1)


def allow_open_files(wanted: int) -> None:
    """Raises this process's limit of open files to `wanted`, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_name_lookups() -> None:
    """Every connection of a torch store asks the name service for the name of an address, to put it into log lines. A
    server that drops one question stalls the connection for 5 s, as long as an edge may take: so ask once, for 1 s."""
    os.environ.setdefault("RES_OPTIONS", f"timeout:{NAME_LOOKUP_S} attempts:1")


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """What is imported in the block stays, so it is never searched for garbage, neither now nor later. Searching it
    again and again is a tenth to a sixth of the time that torch takes to import, and 100 ms of standstill whenever
    Python searches everything."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def record_error(message: str) -> None:
    """Leaves the reason of this rank's end where the agent (or torchrun) looks for it. The first reason counts: what
    follows it is how the process then ends."""
    path = os.environ.get(ERROR_FILE_VARIABLE, "")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def beat_to_agent() -> None:
    """From now on a thread reports to the agent each second that this process runs; what holds the interpreter, or
    stops the process, is noticed there. Without an agent it does nothing."""
    named = os.environ.pop(BEAT_VARIABLE, "")
    if not named.isdigit():
        return
    pipe = int(named)
    os.set_inheritable(pipe, False)

    def beat() -> None:
        with contextlib.suppress(OSError):  # the agent is gone, and this process is about to be
            while True:
                os.write(pipe, b".")
                time.sleep(BEAT_S)

    threading.Thread(target=beat, name="beat", daemon=True).start()


def set_death_signal() -> None:
    """Asks the kernel for SIGKILL when the parent ends. Safe between fork and exec; it survives exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The living processes below `pid`, nearest first. A worker runs in a session of its own, so a process group does
    not reach it; this does."""
    found = [pid]
    for one in found:  # which grows meanwhile
        found += children(one)
    return found[1:]


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and everything below it."""
    for one in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The living processes that `pid` started itself."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
