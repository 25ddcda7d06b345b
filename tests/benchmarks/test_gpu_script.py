"""The script for the first run on a GPU, rehearsed without one: a GPU is rarely available, and only for minutes."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.engine.options import EngineOptions
from baton.runtime.process import children
from benchmarks import gpu
from benchmarks.gpu import FAULT, PARTS, Part, commit
from tests.support.cluster import command_line

ROOT = Path(__file__).resolve().parents[2]


def rehearse(out: Path, *arguments: str, seconds: float = 1200, **environment: str) -> tuple[int, str]:
    """The exit code and the report."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--out", str(out), *arguments]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=out.parent, timeout=seconds
    )
    report = out.read_text()
    assert ran.stdout == report, "what is shown is what is written"
    return ran.returncode, report


QUICK_PARTS = ("environment", "kernel-times", "first-step", "first-edge")
"""Those whose figures come before all others; beside parts that fail, an engine. `make test-long` rehearses all: most
others run the same functions with other settings, clusters and tests that the suite has anyway, or what is not
Baton's."""


def test_no_early_part_waits_until_flashinfer_has_compiled_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine import loading
    from benchmarks.gpu_parts import eight_b

    attention: list[str] = []

    def load(options: EngineOptions, *_: object, **__: object) -> None:
        attention.append(options.attention)
        raise InterruptedError

    monkeypatch.setattr(loading, "load_runner", load)
    monkeypatch.setattr(eight_b, "DEVICE", "cuda")
    monkeypatch.setattr(eight_b, "RandomTensors", lambda *_: None)
    with pytest.raises(InterruptedError):
        eight_b.make_runner()
    assert attention == ["triton"]


@pytest.mark.timeout(1200)
def test_parts_run_without_a_gpu(tmp_path: Path) -> None:
    parts = [part for part in PARTS if part.name in QUICK_PARTS]
    assert len(parts) == len(QUICK_PARTS)
    arguments = ["--quick", "--part", *QUICK_PARTS]
    code, report = rehearse(tmp_path / "report.md", "--limit-factor", "3", *arguments)
    assert_all_ran(code, report, parts)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("quick", [("--quick",), ()], ids=["quick", "whole"])
def test_all_parts_run_without_a_gpu(quick: tuple[str, ...], tmp_path: Path) -> None:
    code, report = rehearse(tmp_path / "report.md", "--limit-factor", "3", *quick)
    assert_all_ran(code, report, PARTS)
    bars = report.partition("\n## Bars\n")[2]
    missing = {name for part in PARTS for name in part.bars if f"| {name} | not measured |" in bars}
    left_out = {"bfloat16 tokens of the CPU", "NCCL peer lost: freed within 5 s"} if quick else set()
    assert missing == left_out


def assert_all_ran(code: int, report: str, parts: Sequence[Part]) -> None:
    for part in parts:
        assert f"\npart {part.name}: **ok** after" in report, report.partition(f"\n## {part.name}\n")[2]
        assert f"| {part.name} | ok |" in report
    assert code == 0 and "failed" not in report and "rehearsal" in report


def results_of(report: str) -> dict[str, str]:
    """The table of parts."""
    table = report.partition("\n## Parts\n")[2].partition("\n## Bars\n")[0].splitlines()
    rows = [line.strip("| ").split(" | ", 1) for line in table if line.startswith("| ")]
    return {name: found for name, found in rows if name != "part"}


def test_failed_part_costs_its_own_results(tmp_path: Path) -> None:
    names, faults = ["first-edge", "graphs", "8b", "edges-nccl"], "first-edge:fail,graphs:killed"
    code, report = rehearse(tmp_path / "r.md", "--quick", "--part", *names, "--limit-factor", "3", **{FAULT: faults})
    found = results_of(report)
    assert code == 1 and f"Planted faults: {faults}" in report and "made to fail" in report
    assert found["first-edge"] == "failed with exit code 1" and found["graphs"] == "killed by signal 9"
    assert found["edges-nccl"] == "skipped: NCCL failed in first-edge" and found["8b"] == "ok"
    assert "| NCCL edge connects and moves bytes | not measured |  | **no** |" in report


def test_hung_part_is_killed_at_its_limit_with_its_child_processes(tmp_path: Path) -> None:
    faults = {FAULT: "transformers:hang"}
    code, report = rehearse(tmp_path / "r.md", "--part", "transformers", "--limit-factor", "0.04", **faults)
    assert code == 1 and "made to hang" in report, "what it printed until then is there"
    assert "part transformers: **timed out**" in report and results_of(report) == {"transformers": "timed out"}
    lines = [" ".join(command_line(int(p))) for p in os.listdir("/proc") if p.isdigit()]
    assert not [line for line in lines if "benchmarks.gpu_parts transformers" in line]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_parts_use_ipc_after_nccl_failed_and_run_again_after_a_cuda_error(tmp_path: Path) -> None:
    faults = "first-edge:fail,kernels:cuda"
    names = ["first-edge", "kernels", "cluster"]
    code, report = rehearse(tmp_path / "r.md", "--quick", "--part", *names, "--limit-factor", "3", **{FAULT: faults})
    found = results_of(report)
    assert code == 1 and found["cluster"] == "ok"
    assert found["kernels"] == "failed with exit code 1; with CUDA_LAUNCH_BLOCKING=1: ok"
    assert "over IPC: NCCL failed in first-edge" in report
    assert "| tokens through a hand-over | equal, over ipc |" in report


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_script_ends_its_part(sig: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--part", "transformers"]
    command += ["--out", str(tmp_path / "r.md")]
    environment = {**os.environ, FAULT: "transformers:hang"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment}
    with subprocess.Popen(command, text=True, cwd=tmp_path, **quiet) as ran:  # type: ignore[call-overload]
        assert ran.stdout is not None
        while "made to hang" not in (line := ran.stdout.readline()):
            assert line, "it ended by itself"
        (part,) = children(ran.pid)
        ran.send_signal(sig)
        assert ran.wait(30) != 0
    assert not Path(f"/proc/{part}").exists()


def test_partial_report_does_not_overwrite_the_complete_one(tmp_path: Path) -> None:
    assert gpu.report_path(False, ["tp2", "8b"]).name == "gpu-8b-tp2.md"
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


def test_first_figures_come_within_90_seconds_and_nothing_is_started_after_eight_minutes() -> None:
    first = PARTS[: gpu.FIRST]
    assert sum(part.limit_s for part in first) <= 90
    assert [part.name for part in first[1:]] == ["kernel-times", "first-step", "first-edge"]
    report = Lines()
    run = gpu.Run(report, {}, factor=1e-6, rehearsal=False)  # type: ignore[arg-type]
    run.part(PARTS[0])
    assert run.results == {"environment": "not run: no time was left"} and gpu.BUDGET_S == 8 * 60


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


def test_nccl_does_not_print_into_the_output_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints to standard output when NCCL_DEBUG is set, and parts print rows that are parsed."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    arguments = argparse.Namespace(rehearse=True, quick=True, wheels=tmp_path / "none")
    environment = gpu.environment_of(arguments, tmp_path, Lines())  # type: ignore[arg-type]
    assert environment["NCCL_DEBUG_FILE"].startswith(str(tmp_path)) and environment["NCCL_DEBUG"] == "INFO"


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
    assert needed - carried == {"torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "pyyaml"}
    pinned = {
        plain(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert carried <= pinned


def test_missing_wheel_folder_or_broken_wheel_is_reported(tmp_path: Path) -> None:
    assert "has no wheels" in gpu.install(tmp_path, tmp_path / "site")
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no zip")
    assert gpu.install(tmp_path, tmp_path / "site")
    shutil.rmtree(tmp_path / "site", ignore_errors=True)
