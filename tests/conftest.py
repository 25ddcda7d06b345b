"""Settings for all tests: their environment; the same Hypothesis examples in every run. Tests marked `gpu` are skipped
without a GPU. Parallel test processes use separate cores if there are enough."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest

from tests.support.environment import set_environment

set_environment()

with contextlib.suppress(ImportError):  # tests/gpu runs without Hypothesis
    from hypothesis import HealthCheck, settings

    SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100, suppress_health_check=SLOW)
    # For a manual search: HYPOTHESIS_PROFILE=deep, with new examples in each run.
    settings.register_profile("deep", deadline=None, max_examples=3000, suppress_health_check=SLOW)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` if torch can use no CUDA device. With BATON_REHEARSE=1, tests marked
    `gpu(rehearsed=True)` run on the CPU, too."""
    marker = item.get_closest_marker("gpu")
    if marker is None or (marker.kwargs.get("rehearsed") and os.environ.get("BATON_REHEARSE") == "1"):
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_collection_finish() -> None:
    """Excludes what collection has made, which stays, from garbage collection: otherwise each full one, and some tests
    cause many, takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Enables garbage collection again: a command that replays loads leaves it off, as its process ends."""
    gc.enable()


def take_cores(worker: int, workers: int) -> None:
    """Gives each test process cores of its own: a cluster pins its workers to the first cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // workers
    if share > 1:
        os.sched_setaffinity(0, cores[worker * share : (worker + 1) * share])


if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    take_cores(int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
