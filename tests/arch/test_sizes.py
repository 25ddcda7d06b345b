"""Size as a budget: a file is one idea and fits in one reading."""

from __future__ import annotations

import ast

from tests.arch.source_tree import ROOT, source_files, tree

MOST_LINES = 350


def test_no_file_is_longer_than_its_budget() -> None:
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in [*source_files(), *tests]}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_an_init_file_holds_a_docstring_at_most() -> None:
    def is_docstring(node: ast.stmt) -> bool:
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    inits = [path for path in source_files() if path.endswith("__init__.py")]
    assert [path for path in inits if not all(map(is_docstring, tree(path).body))] == []


def test_every_file_says_what_it_is() -> None:
    assert [path for path in source_files() if tree(path).body and ast.get_docstring(tree(path)) is None] == []
