"""Prints, as JSON, what a process was given and what it is: `python -m tests.support.process_facts [HOW]`.

HOW is how it ends: `7`, `text`, `error`, `signal`, or `late`, with output of a thread and of `atexit`. With `child LOG`
it starts another one as the launcher starts a process, and prints that one's output.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from launch.child import Child, ChildSpec

PR_GET_PDEATHSIG = 2
OF_GLIBC = 0b11 << 31
"""The signals 32 and 33, by which glibc cancels threads and changes their user. It handles them from its first thread
on, so whether a process ignores them as its parent does, in some shells' jobs, depends on that."""


def facts() -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death), 0, 0, 0)
    shown = [Path(f"/proc/self/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")]
    words, environment = ([word.decode() for word in some if word] for some in shown)
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "module": [__name__, __spec__.name, sys.modules["__main__"].__file__],
        "command line": words,
        "environment": sorted(environment),
        "same environment": sorted(f"{name}={value}" for name, value in os.environ.items()) == sorted(environment),
        "cwd": os.getcwd(),
        "parent": os.getppid(),
        "own session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "files": sorted(re.sub(r"\d+", "N", target) for target in open_files().values()),
        "signals": {
            name: int(mask, 16) & ~OF_GLIBC
            for name, mask in re.findall(r"^(Sig(?:Blk|Ign|Cgt)):\s*(\w+)$", status, re.MULTILINE)
        },
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "death signal": death.value,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": threading.active_count(),
        "output": [describe(stream) for stream in (sys.stdout, sys.stderr)],
    }


def open_files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue
    return found


def describe(stream: Any) -> list[Any]:
    buffering = [stream.line_buffering, stream.write_through, type(stream.buffer).__name__]
    return [stream.encoding, stream.errors, stream.newlines, *buffering]


def end(how: str) -> None:
    match how:
        case "7":
            sys.exit(7)
        case "text":
            sys.exit("a reason")
        case "error":
            raise ValueError("a reason")
        case "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        case "late":
            atexit.register(print, "at exit", end="")
            threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()


def start_child(log: Path) -> None:
    reader, writer = os.pipe()
    command = (sys.executable, "-m", "tests.support.process_facts", "7")
    core = max(os.sched_getaffinity(0))
    child = Child(ChildSpec("child", command, log, {"GIVEN": "a value"}, (core,), files=(writer,)))
    assert child.wait(60) == 7 and reader
    print(json.dumps([os.getpid(), json.loads(log.read_text().splitlines()[1])]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        start_child(Path(sys.argv[2]))
    else:
        print(json.dumps(facts()))
        end("".join(sys.argv[1:]))
