"""The generated parts of the pages are up to date with the code."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields

import pytest

from baton.runtime.config import CoordinatorConfig, WorkerConfig
from coordinator.http.app import HttpSettings
from launch.kubernetes.config import KubernetesConfig
from launch.up_config import DoctorConfig, UpConfig
from tests.docs.generate import PAGES, PARTS, ROOT, fresh, names
from tools.shape import product_files

CONFIGS = {
    c.__name__: c for c in (CoordinatorConfig, WorkerConfig, UpConfig, DoctorConfig, KubernetesConfig, HttpSettings)
}


@pytest.mark.parametrize("page", PAGES)
def test_page_is_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert fresh(text) == text, f"{page} is stale: python -m tests.docs.generate"


def test_each_generated_part_is_in_exactly_one_page() -> None:
    found = [name for page in PAGES for name in names((ROOT / page).read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(PARTS)


def waits() -> list[tuple[str, float]]:
    """Name and seconds of each row in the tables of waits that names an option or a constant."""
    text = (ROOT / "docs/failure-modes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| ([\d.]+) s(?: more[^|]*)? \| `([^`]+)` \|$", text, re.MULTILINE)
    return [(name, float(seconds)) for seconds, name in rows]


def test_tables_of_waits_are_found() -> None:
    assert len(waits()) > 25


@pytest.mark.parametrize(("name", "seconds"), [w for w in waits() if "." in w[0] or " " in w[0]])
def test_wait_equals_the_value_on_the_page(name: str, seconds: float) -> None:
    found = value_of(name)
    if found is not None:
        assert found == seconds


LIVENESS = "baton/core/liveness.py"


def constants(tree: ast.Module) -> list[str]:
    targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_each_limit_of_liveness_is_in_the_tables_once_with_its_value() -> None:
    defined = constants(product_files()[LIVENESS])
    compared = [name.split()[1] for name, _ in waits() if name.startswith(f"{LIVENESS} ")]
    assert len(compared) > 10 and sorted(compared) == sorted(defined)


def test_no_other_file_defines_a_limit_of_liveness() -> None:
    files = product_files()
    limits = set(constants(files.pop(LIVENESS)))
    assert {path: again for path, tree in files.items() if (again := limits.intersection(constants(tree)))} == {}


def test_files_and_names_in_the_tables_exist() -> None:
    text = (ROOT / "docs/failure-modes.md").read_text(encoding="utf-8")
    places = re.findall(r"`([\w/]+\.(?:py|sh)) (\w+)`", text)
    assert len(places) > 30
    for path, name in places:
        if name.startswith("test_"):
            continue
        found = [ROOT / path] if "/" in path else [p for p in ROOT.rglob(path) if ".venv" not in p.parts]
        assert any(name in p.read_text(encoding="utf-8") for p in found if p.exists()), (path, name)


def value_of(name: str) -> float | None:
    """The value of `Config.field` or `path/to/file.py CONSTANT`; None for a literal in a function."""
    path, _, constant = name.partition(" ")
    if constant:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and constant in [t.id for t in node.targets if isinstance(t, ast.Name)]:
                return _number(node.value)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else ()
                together = dict(zip(map(ast.unparse, targets), node.value.elts, strict=False))
                if constant in together:
                    return _number(together[constant])
        raise AssertionError(f"{path} has no {constant}")
    cls, _, field = name.partition(".")
    if cls not in CONFIGS:
        return None
    (found,) = [f.default for f in fields(CONFIGS[cls]) if f.name == field]
    return float(found)


def _number(node: ast.expr) -> float | None:
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else None


def test_functions_and_classes_named_by_waits_exist() -> None:
    """Each function or class that a row names exists."""
    places = {
        "WorkerSession._one_session": "baton.runtime.session",
        "serve_stream": "baton.runtime.streams",
        "MessageStream.send": "baton.runtime.streams",
        "EdgeWorker.grace_s": None,
        "Sender._run": "prefill.sender",
    }
    text = (ROOT / "docs/failure-modes.md").read_text(encoding="utf-8")
    for name, module in places.items():
        assert f"`{name}`" in text
        if module is not None:
            found: object = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
