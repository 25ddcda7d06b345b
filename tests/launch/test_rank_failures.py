"""Which rank the box is about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.rank_failures import KILL_DELAY_S, first_failure, kill_soon, recorded

LOST = "rank 1 is silent for 4.0 s"

HANGS = f"""
import os, signal, time
from baton.process import die_with_parent, record_error
die_with_parent()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
record_error({LOST!r})
os._exit(4)
"""


def end(code: int, at: int, reason: str = "") -> Any:
    data = {"message": {"message": reason} if reason else "<NONE>"}
    return SimpleNamespace(exitcode=code, timestamp=at, error_file_data=data)


def test_a_rank_that_was_killed_left_no_reason() -> None:
    failures = [SimpleNamespace(error_file_data={"message": words}) for words in ("<NONE>", {"message": "it broke"})]
    assert [recorded(failure) for failure in failures] == ["", "it broke"]


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: end(4, 10, LOST), 1: end(-9, 10 + KILL_DELAY_S)}, 0),  # it hung: torchrun killed it
        ({0: end(4, 10, LOST), 1: end(-9, 40), 2: end(-15, 10)}, 0),
        ({0: end(4, 10, "rank 1 is gone"), 1: end(-9, 10)}, 1),  # the kernel did
        ({0: end(-9, 40), 1: end(-11, 10)}, 1),
        ({0: end(4, 10, "rank 1: bad"), 1: end(3, 11, "bad")}, 1),
        ({0: end(-15, 10), 1: end(-15, 10, "it broke")}, 1),
        ({0: end(4, 11), 1: end(-15, 10)}, 1),
    ],
)
def test_the_box_is_about_the_rank_that_failed_of_its_own_accord(failures: dict[int, Any], first: int) -> None:
    assert first_failure(failures) == first


def test_torchrun_kills_what_hangs_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.api import PContext

    asked: list[int] = []
    context = SimpleNamespace(
        _close=lambda death_sig, timeout: asked.append(timeout),
        _tail_logs=[],
        filtered_stdout=None,
        filtered_stderr=None,
    )
    monkeypatch.setattr(PContext, "close", PContext.close)
    kill_soon()
    PContext.close(context)  # type: ignore[arg-type]
    PContext.close(context, signal.SIGTERM, 30)  # type: ignore[arg-type]
    assert asked == [KILL_DELAY_S] * 2


def test_a_rank_that_hangs_is_told_of_in_the_words_of_the_one_that_missed_it(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "launch.agent", "--nproc-per-node", "2", "-m", "hangs"],
        env={**{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 4, done.stderr
    assert "OMP_NUM_THREADS" not in done.stderr  # torchrun's advice on threads, which Baton's ranks set for themselves
    assert "rank 0 of 2" in done.stderr and LOST in done.stderr and "memory ran out" not in done.stderr
