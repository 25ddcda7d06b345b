"""Models with random weights, made on the device: no checkpoint is written or read. And `baton up` whose workers
compute with them, of the shape in config.json: `python -m benchmarks.gpu_parts.random_weights --model DIR ...`. It
starts this file again as each worker."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from baton.runtime.options import config_command, run_main
from benchmarks.gpu_parts.setting import Failed
from launch.members import Programs
from launch.up import up
from launch.up_config import UpConfig


class RandomTensors:
    """A checkpoint of random weights that are generated on the device; see checkpoint.Checkpoint."""

    def __init__(self, config: Any, device: Any, dtype: Any) -> None:
        from types import SimpleNamespace

        from baton.engine.weights import expected_tensors

        self._device, self._dtype = device, dtype
        self.tensors = {
            name: SimpleNamespace(shape=size, file=Path("random")) for name, size in expected_tensors(config).items()
        }

    def verify(self, expected: Any, dtype: Any) -> None:
        if set(expected) != set(self.tensors):
            raise Failed("random weights of another model")

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Any:
        import torch

        size = self.tensors[name].shape
        if len(size) == 1:
            return torch.ones(size, device=self._device, dtype=self._dtype)[rows]
        generator = torch.Generator(self._device).manual_seed(hash_of(name))
        made = torch.randn(size, device=self._device, dtype=self._dtype, generator=generator)
        return made.mul_(size[1] ** -0.5)[rows, columns]


def hash_of(name: str) -> int:
    return zlib.crc32(name.encode())


def write_config(directory: Path, name: str) -> None:
    """The config.json of one of the shapes of benchmarks/make_checkpoint.py."""
    from benchmarks.make_checkpoint import SHAPES
    from tests.support.checkpoints import Shape, make_config

    more = {"vocab_size": 4096} if name == "tiny" else {}
    (directory / "config.json").write_text(json.dumps(make_config("llama", Shape(**SHAPES[name], **more))))


def config_of(name: str) -> Any:
    from baton.engine.checkpoint import read_model_config

    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), name)
        return read_model_config(Path(directory))


def random_model(directory: Path, name: str) -> None:
    """A model directory without weights, with the tokenizer of the built-in model."""
    from baton.runtime.model_source import builtin_directory

    directory.mkdir()
    for file in builtin_directory("target").iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    write_config(directory, name)


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
