"""tests/support/forks.py: a forked process is what a process started with exec is, and so are those that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.process import ERROR_FILE_VARIABLE, HEARTBEAT_VARIABLE, PARENT_VARIABLE
from coordinator.__main__ import use_huge_pages
from tests.support.forks import RESTARTED, ForkedProcess, may_fork

FACTS = [sys.executable, "-m", "tests.support.process_facts"]
ROOT = Path(__file__).parents[2]
BOTH = [subprocess.Popen, ForkedProcess]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def run(start: type[subprocess.Popen[bytes]], words: list[str], where: Path, **options: Any) -> tuple[int, str, str]:
    """The exit code, and what it wrote to stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GIVEN": "ä value", **options.pop("env", {})}
    out, err = where / f"{start.__name__}.out", where / f"{start.__name__}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = start(
            [*FACTS, *words], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, **options
        )
    code = process.wait(120)
    return code, out.read_text(), err.read_text()


@pytest.mark.parametrize("options", [{"start_new_session": True}, {"env": {"PYTHONUNBUFFERED": "1"}, "cwd": "/"}])
def test_it_has_the_same_files_signals_session_place_and_cores(options: dict[str, Any], tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        by_exec, forked = (json.loads(run(start, [], tmp_path, **options)[1]) for start in BOTH)
    finally:
        os.sched_setaffinity(0, cores)
    for facts, start in ((by_exec, BOTH[0]), (forked, BOTH[1])):
        facts["files"] = [target.replace(start.__name__, "X") for target in facts["files"]]
    assert forked == by_exec and forked["parent"] == os.getpid()
    assert "GIVEN=ä value" in forked["environment"]


@pytest.mark.parametrize("how", ["7", "text", "error", "signal", "late"])
def test_it_ends_in_the_same_way(how: str, tmp_path: Path) -> None:
    (code, out, err), (forked_code, forked_out, forked_err) = (run(start, [how], tmp_path) for start in BOTH)
    assert forked_code == code and forked_out.partition("\n")[2] == out.partition("\n")[2]
    assert forked_err.splitlines()[-1:] == err.splitlines()[-1:]


def test_what_it_starts_as_the_launcher_does_is_the_same(tmp_path: Path) -> None:
    found = []
    for start in BOTH:
        log = tmp_path / start.__name__ / "log"
        log.parent.mkdir()
        code, out, err = run(start, ["child", str(log)], tmp_path, env={"OMP_NUM_THREADS": "1"})
        assert code == 0, err
        pid, facts = json.loads(out)
        assert facts["parent"] == pid and f"{PARENT_VARIABLE}={pid}" in facts["environment"]
        own = (PARENT_VARIABLE, ERROR_FILE_VARIABLE, HEARTBEAT_VARIABLE)  # with numbers of processes and files
        facts["environment"] = [text for text in facts["environment"] if not text.startswith(own)]
        facts["files"] = [target.replace(start.__name__, "X") for target in facts["files"]]
        found.append({name: value for name, value in facts.items() if name != "parent"})
    assert found[0] == found[1]


def test_what_has_code_of_a_test_is_not_forked(tmp_path: Path) -> None:
    up = [sys.executable, "-m", "launch.cli", "up"]
    assert may_fork(up, {"PYTHONPATH": str(ROOT)}) and may_fork(up, {})
    assert not may_fork(up, {"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert not may_fork([sys.executable, "-m", "torch.distributed.run"], {})
    assert not may_fork(["python", *up[1:]], {}) and not may_fork([sys.executable, "up.py"], {})


def test_a_forked_coordinator_does_not_start_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it would leave what it has imported"))
    monkeypatch.setenv(*RESTARTED)
    use_huge_pages()
