"""A rank as a fork of its agent, which has imported what it needs: otherwise what `python -u -m module` would be.

What exec does is done here by hand, since there is none: signals at their defaults, no file of the agent's left open,
a command line of its own to be found by. As any rank it has a session of its own and dies with its agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from baton.process import set_death_signal
from launch.lone_rank import LoneRank

_ARGUMENTS = slice(45, 47)  # arg_start and arg_end among the fields of /proc/self/stat that follow the name


@dataclass(frozen=True, slots=True)
class Forked:
    """A child process."""

    pid: int

    def wait(self) -> int:
        """Its exit code, below 0 for a signal, as in `subprocess`."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def forked(rank: LoneRank, environment: Mapping[str, str], close: Iterable[int] = ()) -> Forked:
    """Starts it with that added to the environment, and without the files `close`. The output streams are the caller's
    and must be unbuffered (PYTHONUNBUFFERED). Main thread only: the kernel ties the rank's death to the thread that
    forked it. Raises OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    agent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler of ours may run in the child
    try:
        pid = os.fork()
        if pid == 0:
            _run(lambda: _become(rank, environment, close, agent, before))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Forked(pid)


def _run(body: Callable[[], None]) -> NoReturn:
    """Ends the process as the interpreter would, without unwinding into the agent below this call."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _become(
    rank: LoneRank, environment: Mapping[str, str], close: Iterable[int], agent: int, mask: set[int | signal.Signals]
) -> None:
    set_death_signal()
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for descriptor in close:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    os.environ.update(environment)
    sys.argv = [rank.module, *rank.arguments]
    show_command([sys.executable, "-u", "-m", rank.module, *rank.arguments])
    runpy.run_module(rank.module, run_name="__main__", alter_sys=True)


def show_command(words: list[str]) -> None:
    """Has `ps` show these words for this process, in place of those it was started with, as far as there is room."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as stat:
            start, end = map(int, stat.read().rpartition(")")[2].split()[_ARGUMENTS])
        room = end - start
        if room > 0:
            text = b"".join(os.fsencode(word) + b"\0" for word in words)
            ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)
