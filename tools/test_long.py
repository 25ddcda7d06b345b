"""`make test-long`: the whole suite with every combination and repetition, an hour or more, run as `make test` runs its
part (run_tests.py). Arguments go to pytest.

Writes `benchmarks/results/test-long-run.md`: machine, commit, counts, the slowest tests and what failed. Exits as
`make test` does.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.provenance import ROOT, commit, machine
from tools.run_tests import run

OUT = ROOT / "benchmarks" / "results" / "test-long-run.md"
SELECTED = ("-m", "not gpu")
_KEPT = re.compile(
    r"=* ?\d+ .*(passed|failed|error|processor)|FAILED|ERROR tests/|SKIPPED"
    r"|\d+\.\d+s (call|setup|teardown|processor) "
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def main() -> int:
    began = commit()
    code, printed = run([*SELECTED, *sys.argv[1:]])
    lines = _COLOUR.sub("", printed).splitlines()
    shown = " ".join(["python tools/test_long.py", *sys.argv[1:]])
    kept = "\n".join(line for line in lines if _KEPT.match(line)).replace(f"{ROOT}/", "")
    OUT.write_text(
        f"# make test-long, as one run\n\n{machine()}. Commit {began}, {datetime.date.today()}, exit code {code}.\n\n"
        f"    {shown}\n\n```\n{kept}\n```\n"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
