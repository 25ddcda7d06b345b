"""One thread per library and Triton's interpreter where there is no GPU (both set before any test imports torch), and
the same Hypothesis examples in every run; and `--part`, for `make test`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pytest

from baton.process import limit_name_lookups
from tests.parts import runs_beside

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


def has_cuda() -> bool:
    """As CUDA's driver says, without torch: a container may have GPUs and not the usual device files."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if not has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")

limit_name_lookups()

with contextlib.suppress(ImportError):  # tests/gpu does without
    from hypothesis import HealthCheck, settings

    SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, suppress_health_check=SLOW)
    # For a hunt by hand: HYPOTHESIS_PROFILE=deep, new examples each time.
    settings.register_profile("deep", deadline=None, max_examples=3000, suppress_health_check=SLOW)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "only the tests that may run beside others, or only those that run alone"
    parser.addoption("--part", choices=("beside", "alone"), help=text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The other part's files are not even imported, unless one is named."""
    part = config.getoption("--part")
    if part is None or not collection_path.match("test_*.py"):
        return None
    named = any((config.invocation_params.dir / arg.partition("::")[0]) == collection_path for arg in config.args)
    return True if not named and runs_beside(collection_path) != (part == "beside") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is not None:
        others = [item for item in items if runs_beside(item.path) != (part == "beside")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if runs_beside(item.path) == (part == "beside")]
