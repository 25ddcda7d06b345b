"""No two files import each other, directly or not."""

from __future__ import annotations

from tools.shape import cycles, dependencies, product_files


def test_source_files_have_no_import_cycle() -> None:
    graph = dependencies(product_files())
    assert len(graph) > 100 and sum(map(len, graph.values())) > 300
    assert cycles(graph) == []


def test_import_cycle_is_detected() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
