"""Pure modules use only the standard library, and no clock, randomness, log, thread or event loop.
The front starts without torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.arch.source_tree import ROOT, imports_of, module_name, pure_files, source_files, tree

IMPURE_MODULES = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "secrets", "select", "selectors", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
    "warnings",
}  # fmt: skip
IMPURE_CALLS = ("open", "print", "input", "exec", "eval", "__import__")


def impurities(source: ast.Module, path: str) -> list[str]:
    """The places that make a module impure."""
    found = [str(i) for i in imports_of(path, source) if i.module.split(".")[0] in IMPURE_MODULES]
    for node in ast.walk(source):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            found.append(f"{path}:{node.lineno} is asynchronous")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"{path}:{node.lineno} calls {node.func.id}")
        elif isinstance(node, ast.Global):
            found.append(f"{path}:{node.lineno} changes a global")
    return found


def test_pure_modules_have_no_side_effects() -> None:
    assert len(pure_files()) > 10
    law = "launch/autoscale/law.py"  # pure, though it imports the planner's values
    found = [line for path in (*pure_files(), law) for line in impurities(tree(path), path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from time import monotonic",
        "def f():\n    import random",
        "import logging",
        "async def f(): pass",
        "print('x')",
        "def f():\n    global g\n    g = 1",
    ],
)
def test_impure_line_is_detected(line: str) -> None:
    assert impurities(ast.parse(line), "baton/core/planted.py")


def loaded_by(modules: list[str], *flags: str) -> set[str]:
    """Every module name loaded in a fresh interpreter that imports these."""
    script = (
        "import sys, json, importlib\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_pure_modules_load_with_the_standard_library_alone() -> None:
    loaded = loaded_by([module_name(path) for path in pure_files()], "-I", "-S")  # -S: no site-packages at all
    foreign = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"__main__"}
    assert foreign == {path.split("/")[0] for path in pure_files()}
    assert "asyncio" not in loaded


WITH_TORCH = ("launch/dry_run.py",)  # which only a dry run loads


@pytest.mark.parametrize("package", ["batches", "coordinator", "launch"])
def test_coordinator_and_launch_never_load_torch(package: str) -> None:
    files = [path for path in source_files() if path.startswith(package + "/") and path not in WITH_TORCH]
    loaded = loaded_by([module_name(path) for path in files])
    assert not {name.split(".")[0] for name in loaded} & {"torch", "transformers"}


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_help_of_a_worker_loads_no_torch(tier: str) -> None:
    assert "torch" not in loaded_by([f"{tier}.__main__"])


def test_help_of_the_coordinator_loads_no_server() -> None:
    assert not loaded_by(["coordinator.command"]) & {"starlette", "grpc", "tokenizers", "uvicorn"}
