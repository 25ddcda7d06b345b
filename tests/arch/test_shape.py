"""The figures of tools/shape.py count what they say."""

from __future__ import annotations

import ast

from tools.shape import classes, code_lines, complete_state, fillers, imports, product_files

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


def test_filler_words_are_counted_where_they_are_names() -> None:
    source = "def what(rest):\n    found = rest.most\n    self._wanted = found\n    found = 'rest'\n"
    assert fillers(ast.parse(source)) == {"what": 1, "rest": 1, "found": 2, "_wanted": 1}


def test_classes_of_one_name_are_listed_with_their_files() -> None:
    tree = ast.parse("class Row: ...\nclass Own: ...")
    assert classes({"a.py": tree, "b.py": ast.parse("class Row: ...")}) == {"Row": ["a.py", "b.py"]}


def test_paragraphs_of_state_are_counted() -> None:
    source = 'class A:\n    """What it is.\n\n    Complete state: `x`.\n    """\n\n    x = "Complete state"\n'
    assert complete_state(ast.parse(source)) == 1


def test_a_class_name_says_which_class_it_is() -> None:
    files = product_files()
    twice = classes(files)
    assert len(files) > 200 and not twice, twice


def test_state_is_described_beside_its_fields() -> None:
    paragraphs = [path for path, tree in product_files().items() if complete_state(tree)]
    assert not paragraphs, "write comments at the fields instead of a paragraph"
