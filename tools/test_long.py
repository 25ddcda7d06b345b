"""`make test-long`: the whole suite with every combination, its log kept with machine, commit and counts.

Writes `benchmarks/results/test-long.md` (a summary and the slowest tests) and exits as pytest does.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.serving import commit, machine

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "test-long.md"
KEPT_LINES = 60


def main() -> int:
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "--durations=25", *sys.argv[1:]]
    started, lines = time.monotonic(), []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.stdout is None:
        raise SystemExit("pytest has no output")
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    code = process.wait()
    minutes = (time.monotonic() - started) / 60
    tail = "\n".join(lines[-KEPT_LINES:]).replace(str(ROOT) + "/", "")
    shown = " ".join(["python", *command[1:]])
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(
        f"# make test-long\n\n{machine()}. Commit {commit()}, {datetime.date.today()}, {minutes:.1f} minutes,"
        f" exit code {code}.\n\n    {shown}\n\n```\n{tail}\n```\n"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
