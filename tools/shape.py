"""The shape of the code in figures: files, lines, longest function, imports of the widest file, import cycles, clock
reads in policies and `baton/core`.

    python tools/shape.py [--json]

Product code is `baton` without generated files, the tiers and `launch`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("baton", "prefill", "decode", "coordinator", "launch")
GENERATED = "baton/v1/"
CLOCKS = ("time.monotonic", "time.time", "time.time_ns", "time.monotonic_ns", "time.perf_counter")


def product_files() -> dict[str, ast.Module]:
    """Every product file by its path from the root."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: ast.parse(path.read_text()) for name, path in named.items() if not name.startswith(GENERATED)}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports; `from a import b` yields a.b and a. Imports for types alone do not count."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
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
    found: list[list[str]] = []

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
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def figures() -> dict[str, object]:
    files = product_files()
    graph = dependencies(files)
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in files}
    functions = {
        f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    widest, longest = max(graph, key=lambda p: len(graph[p])), max(functions, key=lambda f: functions[f])
    clocks = {
        path: count
        for path, tree in files.items()
        if (count := sum(isinstance(n, ast.Call) and ast.unparse(n.func) in CLOCKS for n in ast.walk(tree)))
    }
    tests = list((ROOT / "tests").rglob("*.py"))
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        "lines by package": {p: sum(n for path, n in lines.items() if path.startswith(f"{p}/")) for p in PACKAGES},
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests),
        "median file": sorted(lines.values())[len(lines) // 2],
        "longest file": max(lines, key=lambda p: lines[p]) + f" ({max(lines.values())})",
        "longest function": f"{longest} ({functions[longest]})",
        "widest file": f"{widest} ({len(graph[widest])} product modules)",
        "import cycles": cycles(graph),
        "files that read a clock": len(clocks),
        "clock reads in policy": {p: n for p, n in clocks.items() if "/policy/" in p or p.startswith("baton/core/")},
    }


def main() -> None:
    found = figures()
    if "--json" in sys.argv:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
