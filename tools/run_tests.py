"""`make test`: runs the suite on all cores, in one process per CORES_EACH cores (enough to start a cluster), but three
at least: two leave a quarter of two cores idle, since tests wait for processes and timeouts.

A file's tests stay in one process, in their order, and are collected there (by_file.py). Arguments go to pytest.
`make test-long` runs its own the same way.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SELECTED = ("-m", "not long and not gpu")
SLOWEST = ("--durations=12", "--durations-min=5", "-p", "tools.processor_time")
_ROOM = {"BATON_TEST_ROOM": "x" * (64 << 10)}
"""Room for the environments of forks (tests/support/forks.py); the last word of _FORKING is room for command lines."""
_FORKING = ("-c", "from tests.support import forks; forks.test_processes()", "x" * (16 << 10))
_FORKED = shlex.join([sys.executable, "-m", "tests.support.suite_process"])
_IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
CORES_EACH, LEAST_PROCESSES, MOST_PROCESSES = 4, 3, 8  # each loads torch and transformers: 0.5 GB


def main() -> int:
    return run([*SELECTED, *sys.argv[1:]])[0]


def run(arguments: list[str]) -> tuple[int, str]:
    """Runs pytest and shows its output as it arrives; returns its exit code and output."""
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest receives it, too, and ends cleanly
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    beside = in_processes(processes(cores), arguments) if cores > 1 else []
    colour = ["--color=yes"] if sys.stdout.isatty() else []
    pytest = _FORKING if "--tx" in beside else ("-m", "pytest")
    command = [sys.executable, *pytest, "-q", *colour, *beside, *SLOWEST, *arguments]
    environment = with_bytecode(os.environ) | (_ROOM if "--tx" in beside else {})
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    if process.stdout is None:
        raise SystemExit("pytest has no output")
    said = bytearray()
    while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
        said += chunk
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    return process.wait(), said.decode(errors="replace")


def in_processes(count: int, arguments: list[str]) -> list[str]:
    """Single tests, named by `::`, are not known before their file is collected: then each process collects all. For
    the whole suite they and the servers of their forks are forks of the process of pytest, which has imported torch."""
    start = ["--tx", f"{count}*popen//python={_FORKED}", "-W", _IMPORTED]
    if sys.platform != "linux" or any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        start = ["-n", str(count)]
    if any("::" in argument for argument in arguments):
        return [*start, "--dist", "loadfile", "--no-loadscope-reorder"]
    one_by_one = ["--dist", "load", "--maxschedchunk", "1"]
    return ["-p", "tools.by_file", *start, *one_by_one, "-o", "console_output_style=classic"]


def processes(cores: int) -> int:
    return max(LEAST_PROCESSES, min(cores // CORES_EACH, MOST_PROCESSES))


def with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Enables bytecode: hundreds of processes import the same files. With bytecode disabled, as in many containers,
    each would compile all of them again: 0.15 s of processor time for a worker, 0.1 s for a coordinator."""
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    sys.exit(main())
