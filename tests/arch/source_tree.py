"""The hand-written source as the architecture tests see it: files, and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.shape import parsed

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "batches", "prefill", "decode", "coordinator", "launch", "sim")
GENERATED = "baton/v1/"

# Pure: decides on values and `now` only, so that tests and the simulator drive the same objects.
PURE_DECODE = (
    "decode/scheduler.py",
    "decode/admission.py",
    "decode/handover.py",
    "decode/ahead.py",
    "decode/held_blocks.py",
    "decode/anti_starvation.py",
    *(f"decode/speculation/{name}.py" for name in ("policy", "drafts", "acceptance", "draft_length", "step_cost")),
)
PURE_PREFILL = ("prefill/scheduler.py", "prefill/handover.py")
PURE_RUNTIME = ("baton/runtime/config.py", "baton/runtime/cluster_token.py")
PURE = (
    "baton/core/*",
    "baton/models/*",
    *PURE_RUNTIME,
    "baton/engine/mask_queue.py",
    *PURE_PREFILL,
    *PURE_DECODE,
    "coordinator/policy/*",
    "batches/expiry.py",
)


@dataclass(frozen=True)
class Import:
    path: str  # of the importing file, relative to the root
    line: int
    module: str  # absolute; `from a import b` counts as a.b
    typing_only: bool  # under `if TYPE_CHECKING`

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"

    def is_of(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")


@cache
def matches(path: str, patterns: tuple[str, ...]) -> bool:
    """`dir/*` matches everything below dir, at any depth; other patterns are globs within one directory."""
    below = any(path.startswith(p[:-1]) for p in patterns if p.endswith("/*"))
    return below or any(Path(path).parent == Path(p).parent and Path(path).match(p) for p in patterns)


@cache
def source_files() -> tuple[str, ...]:
    found = (p.relative_to(ROOT).as_posix() for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    return tuple(sorted(p for p in found if not p.startswith(GENERATED)))


def pure_files() -> tuple[str, ...]:
    return tuple(p for p in source_files() if matches(p, PURE))


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def tree(path: str) -> ast.Module:
    return parsed(ROOT / path)


def imports_of(path: str, source: ast.Module | None = None) -> list[Import]:
    """Every import of the file, including lazy ones inside functions."""
    return list(_walk(path, source or tree(path), False))


def is_for_types(test: ast.expr) -> bool:
    return any(getattr(node, "id", getattr(node, "attr", "")) == "TYPE_CHECKING" for node in ast.walk(test))


def _walk(path: str, node: ast.AST, typing_only: bool) -> Iterator[Import]:
    """No expression contains an import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(path, child.lineno, alias.name, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                package = module_name(path).split(".")
                keep = len(package) - child.level + path.endswith("__init__.py")
                base = ".".join(part for part in (*package[:keep], base) if part)
            for alias in child.names:
                yield Import(path, child.lineno, f"{base}.{alias.name}", typing_only)
        elif isinstance(child, ast.If) and is_for_types(child.test):
            yield from _walk(path, ast.Module(child.body, []), True)
            yield from _walk(path, ast.Module(child.orelse, []), typing_only)
        elif not isinstance(child, ast.expr):
            yield from _walk(path, child, typing_only)
