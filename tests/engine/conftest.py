from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by their arguments, each written once per session. Do not modify them."""
    made: dict[str, Path] = {}

    def make(arch: str = "llama", **options: Any) -> Path:
        key = f"{arch} {sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), arch, **options)
        return made[key]

    return make
