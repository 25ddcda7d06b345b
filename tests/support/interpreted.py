"""A runner that computes as on CUDA, but on the CPU: fused layers, paged attention, decode steps from fixed arrays and
draws, all in Triton's interpreter, which executes a kernel's programs one after another with numpy.

It shows what a kernel's source fixes: which keys and inputs a program reads, in which tiles and in which order it adds
them up. It does not show what a compiler makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from baton.engine.runner import Runner
from tests.support.engine_driver import tiny_runner


def _widened(tensor: Any) -> Any:
    """A bfloat16 tensor of the interpreter, which holds it as integers, as float32."""
    return (tensor.data.astype(np.uint32) << 16).view(np.float32)


@contextmanager
def ordered_products() -> Iterator[None]:
    """Makes the interpreter multiply matrices in one order: all products of an element are added up front to back, in
    float32. numpy's own order depends on the place of a row in the matrix, and it multiplies bfloat16 as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (_widened(t) if t.dtype.scalar == tl.bfloat16 else t.data for t in (a, b))
        products = left.T[:, :, None] * right[:, None, :]
        return TensorHandle(np.add.reduce(products, axis=0) + d.data, d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


def interpreted_runner(model_dir: Path, **options: Any) -> Runner:
    """`tiny_runner` on this path, without warm-up and self-test, which would take minutes."""
    from baton.engine import computing, loading
    from baton.engine.kernels.fused import fused
    from baton.engine.layers import Rotary
    from baton.engine.model import Model

    def build_model(config: Any, weights: Any, group: Any, kernels: Any, longest: int, chosen: Any) -> Model:
        rotary = Rotary(config, longest, weights.dtype, weights.device)
        return Model(config, weights, group, fused(rotary, exact=chosen.exact))

    patches = {
        "build_model": build_model,
        "how_to_compute": computing._on_cuda,
        "check_exact": lambda *_: None,
        "prove_row_invariance": lambda *_: None,
        "warm_up": lambda *_: None,
    }
    with mock.patch.multiple(loading, **patches):
        return tiny_runner(model_dir, kernels="torch", **options)
