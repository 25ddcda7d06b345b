"""What may run beside other tests keeps no time and starts no cluster."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.parts import runs_beside

TESTS = Path(__file__).parents[1]
KITS = {f"tests.support.{kit}" for kit in ("cluster", "fault_cluster", "jobs", "limits", "netns", "rank_pool")}
CLOCKS = {"monotonic", "perf_counter", "time_ns"}


def needs_quiet(source: ast.Module) -> set[str]:
    """What in a test wants a machine for itself."""
    found = set()
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and node.module in KITS:
            found.add(str(node.module))
        elif isinstance(node, ast.Attribute) and (node.attr in CLOCKS or node.attr == "cluster"):
            found.add(node.attr)
    return found


def test_what_runs_beside_others_needs_no_quiet() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    beside = [path for path in files if runs_beside(path)]
    assert len(files) > len(beside) > 50
    found = {str(path): needs_quiet(ast.parse(path.read_text(encoding="utf-8"))) for path in beside}
    assert {path: what for path, what in found.items() if what} == {}


def test_a_new_directory_runs_alone() -> None:
    assert not runs_beside(TESTS / "newly" / "test_made.py") and not runs_beside(TESTS / "cluster" / "test_faults.py")


@pytest.mark.parametrize(
    "line",
    ["from tests.support.limits import Stall", "began = time.monotonic()", "pytestmark = pytest.mark.cluster"],
)
def test_the_check_catches(line: str) -> None:
    assert needs_quiet(ast.parse(line))
