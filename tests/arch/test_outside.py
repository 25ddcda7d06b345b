"""What is outside the product points one way: tools <- tests/support <- benchmarks <- tests/benchmarks. The training of
the built-in pair stands alone. And what these files import of us exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.arch.source_tree import PACKAGES, ROOT, Import, imports_of, matches
from tools.shape import nodes, parsed

OUTSIDE = ("tools", "training", "benchmarks", "tests")
OURS = (*PACKAGES, *OUTSIDE)

# The first row that matches a file lists what it may import of what is outside the product.
MAY_IMPORT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("tools/*",), ("tools",)),
    (("training/*",), ("training",)),
    (("tests/support/*",), ("tests.support", "tools")),
    (("benchmarks/*",), ("benchmarks", "tests.support", "tools")),
    (("tests/benchmarks/*",), ("tests", "tools", "benchmarks")),
    (("tests/builtin/*",), ("tests", "tools", "training")),
    (("tests/*",), ("tests", "tools")),
)


def outside_files() -> dict[str, ast.Module]:
    paths = (path for folder in OUTSIDE for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): parsed(path) for path in paths}


def is_wrong(found: Import) -> bool:
    if not any(found.is_of(folder) for folder in OUTSIDE):
        return False
    allowed = next(packages for patterns, packages in MAY_IMPORT if matches(found.path, patterns))
    return not any(found.is_of(package) for package in allowed)


def is_missing(found: Import, root: Path = ROOT) -> bool:
    """Whether neither the module nor, for `from a import b`, the module a exists; generated modules do."""
    if not any(found.is_of(package) for package in OURS) or found.is_of("baton.v1"):
        return False
    parts = found.module.split(".")
    candidates = [root.joinpath(*parts), root.joinpath(*parts[:-1])]
    if candidates[0].with_suffix(".py").exists() or candidates[0].is_dir():
        return False
    module = candidates[1].with_suffix(".py")
    if not module.exists():
        module = candidates[1] / "__init__.py"
    return not module.exists() or parts[-1] not in names_in(module)


@cache
def names_in(module: Path) -> set[str]:
    """Names that a module defines or imports at any depth, and `*`."""
    names = {"*"}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Import, ast.ImportFrom)
    for node in nodes(parsed(module), *kinds):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_benchmarks_tests_and_tools_import_in_one_direction() -> None:
    files = outside_files()
    assert {path.split("/")[0] for path in files} == set(OUTSIDE)
    wrong = [str(each) for path, tree in files.items() for each in imports_of(path, tree) if is_wrong(each)]
    assert not wrong, "\n".join(wrong)


def test_benchmarks_tools_and_training_import_what_exists() -> None:
    files = {path: tree for path, tree in outside_files().items() if not path.startswith("tests/")}
    missing = [str(each) for path, tree in files.items() for each in imports_of(path, tree) if is_missing(each)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("path", "module", "wrong"),
    [
        ("benchmarks/peers.py", "tests.cluster.test_parity", True),
        ("benchmarks/peers.py", "tests.support.client.Client", False),
        ("tests/support/client.py", "benchmarks.kit.cluster", True),
        ("tests/decode/test_ahead.py", "benchmarks.gpu_parts.ahead", True),
        ("tests/benchmarks/test_gpu_script.py", "benchmarks.gpu", False),
        ("tools/test_long.py", "benchmarks.kit.commit", True),
        ("training/card.py", "tools.provenance.machine", True),
    ],
)
def test_wrong_direction_is_detected(path: str, module: str, wrong: bool) -> None:
    assert is_wrong(Import(path, 1, module, False)) is wrong


def test_missing_module_or_name_is_detected() -> None:
    assert is_missing(Import("benchmarks/x.py", 1, "baton.worker_ranks", False))
    assert is_missing(Import("benchmarks/x.py", 1, "baton.runtime.worker_ranks.no_such_name", False))
    assert not is_missing(Import("benchmarks/x.py", 1, "baton.runtime.worker_ranks", False))
    assert not is_missing(Import("benchmarks/x.py", 1, "baton.core.request.SamplingParams", False))
