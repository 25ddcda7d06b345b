"""`make test`: first the tests that mind nobody, side by side on all cores; then, one after the other, those that start
processes or hold a time. `tests/parts.py` says which is which. `make test-long` runs its tests the same way.

Arguments go to pytest. The last lines repeat what failed in either part and add up the counts; the exit code is 0 only
when both parts passed, and pytest's own for the first that did not.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SELECTED = ("-m", "not long and not gpu")
SLOWEST = ("--durations=12", "--durations-min=5")
MOST_WORKERS = 8  # each loads torch and transformers: 0.5 GB
PASSED, INTERRUPTED, NOTHING_SELECTED = 0, 2, 5
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FAILED = re.compile(r"(FAILED|ERROR) tests/")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|warnings?)\b")


def main() -> int:
    return run_all([*SELECTED, *sys.argv[1:]])[0]


def run_all(arguments: list[str]) -> tuple[int, list[str]]:
    """Both parts with these arguments for pytest: the exit code, and the lines that were printed, without colours."""
    workers = min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1, MOST_WORKERS)
    beside = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest hears it too, and says so before it ends
    started, codes, failed, counts = time.monotonic(), [], [], Counter[str]()
    printed: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        printed.extend(text.splitlines())

    for part, flags in (("beside", beside), ("alone", ("-p", "no:xdist", *SLOWEST))):
        say(f"\n--- {part}: {'side by side' if '-n' in flags else 'one after the other'}")
        code, text = run(["--part", part, *flags, *arguments])
        codes.append(code)
        lines = _COLOUR.sub("", text).splitlines()
        printed += lines
        failed += filter(_FAILED.match, lines)
        counts.update({name: int(count) for count, name in _COUNT.findall(lines[-1] if lines else "")})
        if code == INTERRUPTED:
            break
    if set(codes) == {NOTHING_SELECTED}:
        return NOTHING_SELECTED, printed
    code = next((code for code in codes if code not in (PASSED, NOTHING_SELECTED)), PASSED)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    if failed:
        say("\n".join(("\n--- what failed", *failed)))
    told = ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing was counted"
    say(
        f"\n{'passed' if code == PASSED else f'FAILED with exit code {code}'}: {told} in {minutes}:{seconds:02} minutes"
    )
    return code, printed


def run(arguments: list[str]) -> tuple[int, str]:
    """pytest's exit code and what it printed, which is shown as it comes."""
    colour = ["--color=yes"] if sys.stdout.isatty() else []
    command = [sys.executable, "-m", "pytest", *colour, *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=with_bytecode(os.environ)
    )
    if process.stdout is None:
        raise SystemExit("pytest has no output")
    said = bytearray()
    while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
        said += chunk
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    return process.wait(), said.decode(errors="replace")


def with_bytecode(environment: Mapping[str, str]) -> dict[str, str]:
    """Hundreds of processes import the same files. Where Python is told to keep no bytecode, as in many containers,
    each would compile all of them anew: 0.15 s of a processor for a worker, 0.1 s for a coordinator."""
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    sys.exit(main())
