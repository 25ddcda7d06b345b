from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint

OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Reports a test as skipped when a torch older than the pinned one fails the self-test of exact mode with torch's
    own kernels. Tests of compiled kernels still run."""
    report = yield
    error = call.excinfo and str(call.excinfo.value)
    if OLD_TORCH and error and "self-test failed" in error and "not row-invariant" in error:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: torch {torch.__version__}: its kernels are not row-invariant")
    return report


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter() -> None:
    """Each launch would patch Triton's language, and so would each call of a function in a kernel."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
        from tests.support.interpreter import patch_once

        patch_once()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes checkpoints from arguments, each written once per session. Do not modify them."""
    made: dict[str, Path] = {}

    def make(arch: str = "llama", **options: Any) -> Path:
        key = f"{arch} {sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), arch, **options)
        return made[key]

    return make
