"""A worker with random weights: `python -m benchmarks.gpu_random_worker prefill|decode ...` (gpu_random_up.py)."""

from __future__ import annotations

import runpy
import sys
from typing import Any


def use_random_weights() -> None:
    import torch

    from baton import worker_ranks
    from baton.engine import loading
    from baton.engine.checkpoint import read_model_config
    from baton.engine.device import choose_device, choose_dtype
    from benchmarks.gpu_parts import RandomTensors

    def load(options: Any, *more: Any, **named: Any) -> Any:
        device = choose_device(options.device, options.exact)
        dtype = getattr(torch, choose_dtype(options.dtype, device, options.exact, options.kernels))
        tensors = RandomTensors(read_model_config(options.model_dir), device, dtype)
        return loading.load_runner(options, *more, tensors=tensors, **named)

    worker_ranks.load_runner = load  # type: ignore[attr-defined]


if __name__ == "__main__":
    role = sys.argv.pop(1)
    use_random_weights()
    runpy.run_module(role, run_name="__main__", alter_sys=True)
