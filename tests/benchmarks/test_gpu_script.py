"""The script for the first run on a GPU, rehearsed without one: a GPU is rarely available, and only for minutes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.process import children
from benchmarks import gpu
from benchmarks.gpu import FAULT, STAGES, commit
from tests.support.cluster import command_line

ROOT = Path(__file__).resolve().parents[2]


def rehearse(out: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and the report."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--out", str(out), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=out.parent)
    report = out.read_text()
    assert ran.stdout == report, "what is shown is what is written"
    return ran.returncode, report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("quick", [("--quick",), pytest.param((), marks=pytest.mark.long)], ids=["quick", "whole"])
def test_all_eight_stages_run_without_a_gpu(quick: tuple[str, ...], tmp_path: Path) -> None:
    code, report = rehearse(tmp_path / "report.md", "--limit-factor", "3", *quick)
    for section in report.split("\n## ")[1 : len(STAGES) + 1]:
        assert "): **ok** after" in section, section
    for stage in STAGES:
        assert f"| {stage.number}. {stage.name} | ok |" in report
    assert code == 0 and "failed" not in report and "rehearsal" in report


def test_failed_stage_is_reported_by_name_and_the_next_one_runs(tmp_path: Path) -> None:
    code, report = rehearse(tmp_path / "r.md", "--stage", "5", "6", "--limit-factor", "3", **{FAULT: "5:fail"})
    assert code == 1 and "made to fail" in report
    assert "stage 5 (engine): **failed with exit code 1**" in report and "| 6. 8b | ok |" in report


def test_hung_stage_is_killed_at_its_limit_with_its_child_processes(tmp_path: Path) -> None:
    started = time.monotonic()
    code, report = rehearse(tmp_path / "r.md", "--stage", "8", "--limit-factor", "0.05", **{FAULT: "8:hang"})
    assert code == 1 and "made to hang" in report, "what it printed until then is there"
    assert "stage 8 (transformers): **timed out**" in report and "| 8. transformers | timed out |" in report
    assert time.monotonic() - started < 60
    lines = [" ".join(command_line(int(p))) for p in os.listdir("/proc") if p.isdigit()]
    assert not [line for line in lines if "gpu_stages.py transformers" in line]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_script_ends_its_stage(sig: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--stage", "8"]
    command += ["--out", str(tmp_path / "r.md")]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": {**os.environ, FAULT: "8:hang"}}
    with subprocess.Popen(command, text=True, cwd=tmp_path, **quiet) as ran:  # type: ignore[call-overload]
        assert ran.stdout is not None
        while "made to hang" not in (line := ran.stdout.readline()):
            assert line, "it ended by itself"
        (stage,) = children(ran.pid)
        ran.send_signal(sig)
        assert ran.wait(30) != 0
    assert not Path(f"/proc/{stage}").exists()


def test_partial_report_does_not_overwrite_the_complete_one(tmp_path: Path) -> None:
    assert gpu.report_path(False, [7, 5]).name == "gpu-stage-5-7.md"
    assert gpu.report_path(True, None) == gpu.REHEARSAL_OUT
    for wrong in (
        ["--limit-factor", "nan"],
        ["--limit-factor", "-1"],
        ["--prepare", __file__],
        ["--out", str(tmp_path)],
    ):
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", *wrong]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert ran.returncode and "Traceback" not in ran.stderr and wrong[0] in ran.stderr


def test_limits_of_all_stages_sum_to_less_than_eight_minutes() -> None:
    assert [stage.number for stage in STAGES] == list(range(1, 9))
    assert sum(stage.limit_s for stage in STAGES) < 8 * 60


def test_commit_is_unknown_without_a_repository_or_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() == "unknown (no repository)"
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown (no git)"


def test_wheels_are_pinned_and_cover_what_the_cluster_imports() -> None:
    """What a worker and a coordinator need is either among the wheels or comes with torch and transformers."""
    import re
    import tomllib

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name.split("[")[0].lower())

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {plain(re.split(r"[><=; ]", line)[0]) for line in project["dependencies"]}
    carried = {plain(name) for name in gpu.WHEELS}
    assert needed - carried == {"torch", "numpy", "safetensors", "tokenizers", "huggingface-hub"}
    pinned = {
        plain(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert carried <= pinned


def test_missing_wheel_folder_or_broken_wheel_is_reported(tmp_path: Path) -> None:
    assert "has no wheels" in gpu.install(tmp_path, tmp_path / "site")
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no zip")
    assert gpu.install(tmp_path, tmp_path / "site")
    shutil.rmtree(tmp_path / "site", ignore_errors=True)
