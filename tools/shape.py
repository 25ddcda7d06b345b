"""The shape of the code in figures: files, lines, code lines (neither blank nor comment nor docstring), longest
function, imports of the widest file, import cycles (imports for types alone included), class names defined twice, error
codes as bare strings, clock reads in policies and other pure files, docstrings with a paragraph "Complete state:",
filler words as names, decision records, benchmark files.

    python tools/shape.py [--json]

Product code is `baton` without generated files, the tiers, `launch` and `sim`, on which `launch` depends.
"""

from __future__ import annotations

import ast
import gc
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path

from baton.core.codes import ErrorCode
from coordinator.policy.codes import PlacementCode

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("baton", "batches", "prefill", "decode", "coordinator", "launch", "sim")
WORKERS = ("baton/", "prefill/", "decode/")
GENERATED = "baton/v1/"
LONG = 600
PURE = ("baton/core/", "baton/models/")
CODES_FILES = ("baton/core/codes.py", "coordinator/policy/codes.py")
CODES = {code.value for code in (*ErrorCode, *PlacementCode)}
OTHER_MEANINGS = {"draining", "aborted"}  # a worker's state in `/workers` and a finish reason
ONLY_CODES = CODES - OTHER_MEANINGS
COMPARED = {"code", "reason", "why", "param", "ended"}
"""Names of codes, and of texts for people, which steer nothing."""
FILLERS = {
    "found",
    "what",
    "wanted",
    "most",
    "rest",
    "whose",
    "those",
    "others",
    "told",
    "gone",
    "landed",
    "begun",
    "stuff",
}
CLOCKS = ("time.monotonic", "time.time", "time.time_ns", "time.monotonic_ns", "time.perf_counter")
NAMING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg, ast.Name, ast.Attribute)
"""The kinds of nodes that may define or assign a name."""


@cache
def parsed(path: Path) -> ast.Module:
    """Parses a file once per process: several tests look at all of them. Garbage collection skips the
    trees, which stay: to visit them again and again took three quarters of the time, and seconds at the end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=path)
    finally:
        gc.freeze()
        if collects:
            gc.enable()


@cache
def _by_kind(tree: ast.Module) -> dict[type[ast.AST], list[ast.AST]]:
    kinds: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(tree):
        kinds.setdefault(type(node), []).append(node)
    return kinds


def nodes(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a file that are of these kinds, one kind after another. A file is walked once per process."""
    by_kind = _by_kind(tree)
    return chain.from_iterable(by_kind.get(kind, ()) for kind in kinds)


def product_files() -> dict[str, ast.Module]:
    """Every product file by its path from the root."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: parsed(path) for name, path in named.items() if not name.startswith(GENERATED)}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports, for types alone too; `from a import b` yields a.b and a."""
    for node in nodes(tree, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dependencies(files: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Which product files each product file imports."""
    by_module = {module_of(path): path for path in files}
    return {
        path: {by_module[name] for name in imports(tree) if name in by_module} - {path} for path, tree in files.items()
    }


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of files that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return groups


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    """Strings that are statements: docstrings of modules, classes, functions, and of the constants above them."""
    for node in nodes(tree, ast.Expr):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def code_lines(source: str) -> int:
    """Number of lines with code: neither blank, nor only a comment, nor of a docstring."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in layout for line in range(t.start[0], t.end[0] + 1)}
    return len(lines.difference(*(range(d.lineno, (d.end_lineno or 0) + 1) for d in docstrings(ast.parse(source)))))


def bare_codes(path: str, tree: ast.Module) -> list[int]:
    """Lines of a file with an error code as a string instead of a member of `ErrorCode` (between tiers) or
    `PlacementCode`: any string that equals one, except words with other meanings; a string, or a constant,
    that is compared with a `code` or with a text for people; and in the workers every `code=`, where mypy would accept
    a misspelt one."""
    lines = set()
    for node in nodes(tree, ast.Compare, ast.keyword, ast.Constant):
        if isinstance(node, ast.Compare) and any(_name(side) in COMPARED for side in (node.left, *node.comparators)):
            lines |= {inner.lineno for inner in ast.walk(node) if _text(inner) is not None}  # type: ignore[attr-defined]
            if isinstance(node.ops[0], ast.Eq | ast.NotEq) and any(_name(side).isupper() for side in node.comparators):
                lines.add(node.lineno)
        elif isinstance(node, ast.keyword) and node.arg == "code" and (text := _text(node.value)) is not None:
            lines |= {node.value.lineno} if text in CODES or path.startswith(WORKERS) else set()
        elif _text(node) in ONLY_CODES:
            lines.add(node.lineno)  # type: ignore[attr-defined]
    return sorted(lines)


def _name(node: ast.expr) -> str:
    """The last part of a name; empty for another expression, or a member of an enum."""
    if isinstance(node, ast.Attribute) and not node.attr.isupper():
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def names(tree: ast.Module) -> Iterator[str]:
    """Every name that a file defines, as often as it is defined or assigned: functions, classes, arguments, fields,
    variables, attributes."""
    for node in nodes(tree, *NAMING):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def fillers(tree: ast.Module) -> Counter[str]:
    """The filler words that are names in a file, and how often."""
    return Counter(name for name in names(tree) if name.strip("_") in FILLERS)


def classes(files: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Class names that are defined more than once, and where."""
    where: dict[str, list[str]] = {}
    for path, tree in files.items():
        for node in nodes(tree, ast.ClassDef):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(path)
    return {name: paths for name, paths in sorted(where.items()) if len(paths) > 1}


def complete_state(tree: ast.Module) -> int:
    """Docstrings that list a class's state in a paragraph instead of beside its fields."""
    return sum("Complete state" in str(node.value.value) for node in docstrings(tree))  # type: ignore[attr-defined]


def figures() -> dict[str, object]:
    files = product_files()
    graph = dependencies(files)
    sources = {path: (ROOT / path).read_text() for path in files}
    lines = {path: len(source.splitlines()) for path, source in sources.items()}
    code = {path: code_lines(source) for path, source in sources.items()}
    filler_names = {path: fillers(tree) for path, tree in files.items()}
    codes = [f"{path}:{n}" for path, tree in files.items() if path not in CODES_FILES for n in bare_codes(path, tree)]
    functions = {
        f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in files.items()
        for node in nodes(tree, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    widest, longest = max(graph, key=lambda p: len(graph[p])), max(functions, key=lambda f: functions[f])
    clocks = {
        path: count
        for path, tree in files.items()
        if (count := sum(isinstance(n, ast.Call) and ast.unparse(n.func) in CLOCKS for n in nodes(tree, ast.Call)))
    }
    tests = list((ROOT / "tests").rglob("*.py"))
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "lines by package": by_package(lines),
        "code lines": sum(code.values()),
        "code lines by package": by_package(code),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests),
        "median file": sorted(lines.values())[len(lines) // 2],
        "longest file": max(lines, key=lambda p: lines[p]) + f" ({max(lines.values())})",
        f"files over {LONG} lines": {path: n for path, n in lines.items() if n > LONG},
        "longest function": f"{longest} ({functions[longest]})",
        "widest file": f"{widest} ({len(graph[widest])} product modules)",
        "import cycles": cycles(graph),
        "class names defined twice": classes(files),
        "paragraphs of state": sum(complete_state(tree) for tree in files.values()),
        "filler names": dict(sum(filler_names.values(), Counter()).most_common()),
        "filler names by package": by_package({path: counts.total() for path, counts in filler_names.items()}),
        "bare codes": len(codes),
        "files that read a clock": len(clocks),
        "clock reads in policy": {p: n for p, n in clocks.items() if "/policy/" in p or p.startswith(PURE)},
        "decision records": len(list((ROOT / "docs/decisions").glob("[0-9]*.md"))),
        "benchmark files": len(list((ROOT / "benchmarks").rglob("*.py"))),
    }


def by_package(lines: Mapping[str, int]) -> dict[str, int]:
    return {p: sum(n for path, n in lines.items() if path.startswith(f"{p}/")) for p in PACKAGES}


def main() -> None:
    shape = figures()
    if "--json" in sys.argv:
        print(json.dumps(shape, indent=2))
        return
    for name, value in shape.items():
        if name == "class names defined twice":
            print(f"{name:28} {len(value)}")  # type: ignore[arg-type]
            for twice, paths in value.items():  # type: ignore[attr-defined]
                print(f"    {twice:24} {', '.join(paths)}")
        else:
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
