"""Every Triton kernel used in serving compiles for GPUs that this machine need not have, the main kernels with at
most a few bytes of spills, and contexts of every length use the same few variants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
IN_SUITE = ("405B with a window, 1 of 8 ranks",)
"""Kernels of several ranks and of a window, in groups of 16 heads of 128. `make test-long` has all models."""
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
KERNELS = {"_attend", "_add_norm", "_rotate_and_store", "_silu_mul", "_linear", "_choose", "_mask_rows", "_mix"}


@cache
def compiled(arch: int, models: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Runs in a separate process: in this one Triton interprets."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels_compiled.py"), "--json", "--arch", str(arch)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    only = ["--only", *models] if models else []
    ran = subprocess.run([*command, *only], capture_output=True, text=True, env=environment, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check_limits(found: list[dict[str, Any]]) -> None:
    for variant in found:
        assert variant["shared_bytes"] <= SHARED_LIMIT[variant["arch"]], variant
        assert variant["registers"] <= 255 and variant["spill_bytes"] <= (16 if variant["main"] else 64), variant
        assert variant["partly_reached"] == 0, variant
    counts = Counter((variant["model"], variant["kernel"]) for variant in found)
    assert {kernel for _, kernel in counts} >= KERNELS
    for (model, kernel), count in counts.items():
        # attention: one for each number of rows in a tile, 16 to 128, and one for exact mode; norms: with and without a
        # sum; sums over ranks: whole and by shares; linear layers: with and without a bias
        most = {"_attend": 5, "_add_norm": 3, "_sum": 2, "_linear": 2}.get(kernel, 1)
        assert count <= most, f"{model}: {count} variants of {kernel} from contexts of 1 to 131,072 tokens"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.long) for arch in (80, 100))])
def test_kernels_compile_with_few_spills_and_in_few_variants(arch: int) -> None:
    check_limits(compiled(arch, IN_SUITE))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_of_every_model_compile_with_few_spills(arch: int) -> None:
    found = compiled(arch)
    check_limits(found)
    assert "_sum_ranks" in {variant["kernel"] for variant in found}


def test_search_of_the_sampler_computes_nothing_in_float64() -> None:
    command = [sys.executable, "-m", "tests.engine.sampler_parts"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count(".visible .entry") == 2 and "ex2.approx" in ran.stdout and "f64" not in ran.stdout
