"""Each planted bug is detected by one of the first seeds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.planted import BUGS, LIMIT, Bug

ROOT = Path(__file__).parents[2]
CODE = ("baton", "prefill", "decode", "coordinator", "sim")
FAST = 30
"""Seeds: the bugs that took fewer are planted by `make test`, if they are among the first SOME."""
SOME = 3


def test_each_bug_is_one_place_that_is_there() -> None:
    assert len(BUGS) >= 30 and len({bug.name for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        assert 0 < bug.seeds <= LIMIT, bug
        for change in bug.changes:
            assert (ROOT / change.path).read_text().count(change.old) == 1, (bug.name, change.old)


def detect(bug: Bug, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs seeds on a copy of the code with a bug in it, until one fails."""
    for name in CODE:
        skipped = shutil.ignore_patterns("__pycache__", "builtin", "engine", "gguf", "http", "openai", "text")
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for change in bug.changes:
        path = folder / change.path
        path.write_text(path.read_text().replace(change.old, change.new))
    command = [sys.executable, "-m", "sim", "--seeds", str(LIMIT), "--stop"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def check(bug: Bug, folder: Path) -> None:
    done = detect(bug, folder)
    assert done.returncode == 1 and "FAILED" in done.stdout, f"{bug.name} is not detected: {done.stdout} {done.stderr}"
    print(f"{bug.name}: {done.stdout}")


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.seeds <= FAST][:SOME], ids=str)
def test_fast_bug_is_detected(bug: Bug, tmp_path: Path) -> None:
    check(bug, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_bug_is_detected(bug: Bug, tmp_path: Path) -> None:
    check(bug, tmp_path)
