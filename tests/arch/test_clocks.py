"""Tests of pure code read no clock and start no cluster: their results do not depend on the machine's load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.shape import nodes, parsed

TESTS = Path(__file__).parents[1]
TIMELESS = (
    "arch/*", "builtin/*", "core/*", "decode/*", "docs/*", "engine/*", "prefill/*",
    "coordinator/test_chat.py", "coordinator/test_policy_*.py", "coordinator/test_schema_*.py",
    "coordinator/test_text*.py", "coordinator/test_translate.py", "runtime/test_codec.py", "runtime/test_frames.py",
)  # fmt: skip
TIMED = (
    "engine/test_parallel*.py", "engine/test_lockstep.py", "engine/test_kernels_build.py", "engine/test_quantize.py",
    "engine/test_mask_processes.py", "engine/test_borrowed_cores.py",
    "engine/test_checkpoint_errors.py", "decode/test_links_refused.py", "decode/test_incoming*.py",
    "prefill/test_edge*.py", "coordinator/test_text.py",
)  # fmt: skip
KITS = {f"tests.support.{kit}" for kit in ("cluster", "fault_cluster", "jobs", "limits", "netns", "rank_pool")}
CLOCKS = {"monotonic", "perf_counter", "time_ns"}


def is_timeless(path: Path) -> bool:
    name = path.relative_to(TESTS)
    return any(map(name.match, TIMELESS)) and not any(map(name.match, TIMED))


def needs_time(source: ast.Module) -> set[str]:
    """The names in a test that make it depend on the machine."""
    found = set()
    for node in nodes(source, ast.ImportFrom, ast.Attribute):
        if isinstance(node, ast.ImportFrom) and node.module in KITS:
            found.add(str(node.module))
        elif isinstance(node, ast.Attribute) and (node.attr in CLOCKS or node.attr == "cluster"):
            found.add(node.attr)
    return found


def test_tests_of_pure_code_do_not_depend_on_time() -> None:
    files = sorted(TESTS.rglob("test_*.py"))
    timeless = [path for path in files if is_timeless(path)]
    assert len(files) > len(timeless) > 50
    found = {str(path): needs_time(parsed(path)) for path in timeless}
    assert {path: what for path, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    ["from tests.support.limits import Stall", "began = time.monotonic()", "pytestmark = pytest.mark.cluster"],
)
def test_time_dependence_is_detected(line: str) -> None:
    assert needs_time(ast.parse(line))
