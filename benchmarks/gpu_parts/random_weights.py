"""`baton up` whose workers compute with random weights of the shape in config.json, without a checkpoint on disk:
`python -m benchmarks.gpu_parts.random_weights --model DIR ...`. It starts this file again as each worker."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from baton.runtime.options import config_command, run_main
from launch.members import Programs
from launch.up import up
from launch.up_config import UpConfig

ROLES = ("prefill", "decode")


@config_command(UpConfig, name="up", help="A cluster with random weights.")
def command(config: UpConfig) -> int:
    return up(config, Programs(worker=("-m", "benchmarks.gpu_parts.random_weights")))


def use_random_weights() -> None:
    import torch

    from baton.engine import loading
    from baton.engine.checkpoint import read_model_config
    from baton.engine.device import choose_device, choose_dtype
    from baton.runtime import worker_ranks
    from benchmarks.gpu_parts.models import RandomTensors

    def load(options: Any, *more: Any, **named: Any) -> Any:
        device = choose_device(options.device)
        dtype = getattr(torch, choose_dtype(options.dtype, device, options.exact, options.kernels))
        tensors = RandomTensors(read_model_config(options.model_dir), device, dtype)
        return loading.load_runner(options, *more, tensors=tensors, **named)

    worker_ranks.load_runner = load  # type: ignore[attr-defined]


if __name__ == "__main__":
    if sys.argv[1] in ROLES:
        role = sys.argv.pop(1)
        use_random_weights()
        runpy.run_module(role, run_name="__main__", alter_sys=True)
    else:
        run_main(command)
