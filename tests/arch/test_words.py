"""Identifiers use the words of docs/glossary.md: words that this project once coined are not used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT, source_files, tree

COINED = {
    "heard": "received, last_..._at",
    "untold": "next_emit_index",
    "buried": "is_tombstoned",
    "guess": "draft token, propose",
    "guesses": "draft tokens",
    "guessed": "drafted",
    "news": "events",
    "favoured": "boosted",
    "mint": "sign",
    "farewell": "drained",
    "lives": "restarts, incarnations",
    "life": "restart, incarnation",
    "settle": "say what is done",
    "roster": "scheduler",
    "holdings": "blocks",
    "told": "reported, sent",
    "tells": "reports, sends",
    "said": "message, output",
    "hear": "receive",
    "hears": "receives",
    "speaks": "sends, supports",
    "knows": "has",
    "nobody": "none, no worker",
    "somebody": "a worker, a client",
    "whoever": "the worker, the client",
    "whom": "the worker, the client",
}
MAX_TERMS = 60


def coined(module: ast.Module, path: str) -> list[str]:
    """Identifiers defined in a module that contain a coined word."""
    found: list[str] = []
    for node in ast.walk(module):
        names: list[tuple[str, int]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.name, node.lineno))
        elif isinstance(node, ast.arg):
            names.append((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.attr, node.lineno))
        for name, line in names:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
            found += [f"{path}:{line} {name}: use {COINED[word]}" for word in words & COINED.keys()]
    return found


def test_no_identifier_has_a_coined_word() -> None:
    files = source_files()
    assert len(files) > 150
    found = [line for path in files for line in coined(tree(path), path)]
    assert not found, "\n".join(found)
    assert not [path for path in files if set(re.split(r"[/_.]", path)) & COINED.keys()]


def test_no_identifier_in_tests_has_a_coined_word() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 200
    found = [line for path in files for line in coined(ast.parse(path.read_text()), path.name)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["last_heard = 1", "def take_news(): ...", "self.guesses = ()", "class Mint: ...", "def f(untold): ..."]
)
def test_coined_words_are_found(line: str) -> None:
    assert coined(ast.parse(line), "planted.py")


def test_glossary_is_short_and_defines_each_term_once() -> None:
    text = Path(ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    terms = [term for term, _ in rows if term not in ("term", "---")]
    assert 30 < len(terms) <= MAX_TERMS and len(set(terms)) == len(terms)
