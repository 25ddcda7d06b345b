"""Each planted fault is found by the tests named for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
CODE = ("baton", "batches", "prefill", "decode", "coordinator", "launch")


def test_each_fault_is_one_place_that_is_there() -> None:
    assert len(FAULTS) >= 170
    for fault in FAULTS:
        assert (ROOT / fault.path).read_text().count(fault.old) == 1, fault
        assert fault.old != fault.new and all((ROOT / name).exists() for name in fault.tests.split()), fault


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code to plant faults in, beside the tests."""
    where = tmp_path_factory.mktemp("planted")
    for name in CODE:
        shutil.copytree(ROOT / name, where / name, ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    (where / "baton" / "builtin").symlink_to(ROOT / "baton" / "builtin")
    for name in ("tests", "tools", "benchmarks", "training", "sim", "docs", "pyproject.toml"):
        (where / name).symlink_to(ROOT / name)
    return where


def run(copy: Path, tests: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not gpu"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [str(copy / name) for name in tests.split()]
    return subprocess.run(
        [*command, *paths], cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_without_a_fault_they_pass(copy: Path) -> None:
    done = run(copy, " ".join(sorted({name for fault in FAULTS for name in fault.tests.split()})), timeout_s=1800.0)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_it_is_found(copy: Path, fault: Fault) -> None:
    path = copy / fault.path
    whole = path.read_text()
    path.write_text(whole.replace(fault.old, fault.new))
    try:
        done = run(copy, fault.tests)
    finally:
        path.write_text(whole)
    assert done.returncode == 1, f"not found\n{done.stdout[-2000:]}"
