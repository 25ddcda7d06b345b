"""The figures of tools/shape.py count what they say."""

from __future__ import annotations

import ast

from tools.shape import code_lines, imports

SOURCE = '''"""A module."""
# a comment

import os  # code with a comment

LIMIT = 3
"""What it limits."""


def f(x: int) -> str:
    """Two
    lines."""
    # a comment
    return """text,
    which is code"""
'''


def test_code_lines_are_neither_blank_nor_comment_nor_docstring() -> None:
    assert code_lines(SOURCE) == 5


def test_an_import_for_types_alone_is_an_import() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from baton.engine.grammars import Grammars\n"
    assert "baton.engine.grammars" in set(imports(ast.parse(source)))
