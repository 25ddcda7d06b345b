"""One thread per library and Triton's interpreter where there is no GPU (both set before any test imports torch), and
the same Hypothesis examples in every run. Tests marked `gpu` are skipped where there is none. Tests side by side keep
off each other's cores where there are enough."""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest

from baton.process import limit_name_lookups

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(variable, "1")


def has_cuda() -> bool:
    """As CUDA's driver says, without torch: a container may have GPUs and not the usual device files."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # else a child that a test forks may abort before it execs

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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The one rule for tests marked `gpu`: without a CUDA device that torch can use they are skipped. Those marked
    `gpu(rehearsed=True)` run on the CPU all the same, under BATON_REHEARSE=1."""
    marker = item.get_closest_marker("gpu")
    if marker is None or (marker.kwargs.get("rehearsed") and os.environ.get("BATON_REHEARSE") == "1"):
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def take_cores(worker: int, workers: int) -> None:
    """A cluster pins its workers to the first cores it may use, so each test process gets cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // workers
    if share > 1:
        os.sched_setaffinity(0, cores[worker * share : (worker + 1) * share])


if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    take_cores(int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
