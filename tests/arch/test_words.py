"""Identifiers use the words of docs/glossary.md: words that this project once coined are not used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT, source_files, tree
from tools.shape import NAMING, nodes, parsed

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
FILLERS = {
    "found": "match, parsed, the kind of thing",
    "what": "message, reason, operation",
    "wanted": "expected, requested, target",
    "most": "limit, max_...",
    "rest": "remainder",
    "whose": "owner",
    "those": "the kind of thing",
    "others": "peers, the kind of thing",
    "stuff": "the kind of thing",
    "begun": "started, has_started",
    "gone": "disconnected, ended",
    "landed": "received",
}
"""As whole names these say nothing."""
MAX_TERMS = 60


def names_of(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that a module defines or assigns, and its line."""
    for node in nodes(module, *NAMING):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def coined(module: ast.Module, path: str) -> list[str]:
    """Identifiers defined in a module that contain a coined word."""
    found: list[str] = []
    for name, line in names_of(module):
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        found += [f"{path}:{line} {name}: use {COINED[word]}" for word in words & COINED.keys()]
    return found


def fillers(module: ast.Module, path: str) -> list[str]:
    """Identifiers defined in a module that are a filler word."""
    names = ((name, name.strip("_"), line) for name, line in names_of(module))
    return [f"{path}:{line} {name}: use {FILLERS[word]}" for name, word, line in names if word in FILLERS]


def test_no_identifier_has_a_coined_word() -> None:
    files = source_files()
    assert len(files) > 150
    found = [line for path in files for line in coined(tree(path), path)]
    assert not found, "\n".join(found)
    assert not [path for path in files if set(re.split(r"[/_.]", path)) & COINED.keys()]


def test_no_identifier_is_a_filler_word() -> None:
    files = source_files()
    assert len(files) > 150
    found = [line for path in files for line in fillers(tree(path), path)]
    assert not found, "\n".join(found)


def test_no_identifier_in_benchmarks_and_training_is_coined_or_a_filler_word() -> None:
    files = [path for folder in ("benchmarks", "training") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 40
    found = [line for path in files for words in (coined, fillers) for line in words(parsed(path), path.name)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["what = 1", "def f(most): ...", "self._wanted = ()", "for rest in (): ..."])
def test_filler_words_are_detected(line: str) -> None:
    assert fillers(ast.parse(line), "planted.py")


def test_names_that_contain_a_filler_word_are_allowed() -> None:
    assert not fillers(ast.parse("most_rows = wanted_tokens = 1"), "planted.py")


def test_no_identifier_in_tests_has_a_coined_word() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 200
    found = [line for path in files for line in coined(parsed(path), path.name)]
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
