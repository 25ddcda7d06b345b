"""A Hugging Face checkpoint directory: which tensor is in which file, and reading slices of them.

`Checkpoint` reads headers only; `verify` compares them with what the model expects; `read` maps one tensor (or a slice
of it) and refuses NaN and Inf. Every problem with a directory is a StartupError of one line that names the file and, if
any, the tensor. Only safetensors (quantised ones dequantised) and GGUF are read: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.blocks import Blocks
from baton.engine.gguf_files import GGUFFiles, read_index
from baton.engine.quantized_files import QuantizedFiles
from baton.engine.safetensors_files import SafetensorsFiles, StoredTensor, read_small, safetensors_in
from baton.models.model_config import AnyConfig, parse_config, parse_config_json


class Checkpoint:
    """The tensors of a checkpoint by name. Those of a model in GGUF (baton.gguf) count as float32."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.tensors: dict[str, StoredTensor]
        self._files: SafetensorsFiles | QuantizedFiles | GGUFFiles
        if (index := read_index(model_dir)) is not None:
            self._files = files = GGUFFiles(index)
            stored = files.index.tensors.items()
            self.tensors = {name: StoredTensor(files.files[t.file], torch.float32, t.shape, name) for name, t in stored}
        else:
            quantization = read_model_config(model_dir).quantization
            stored_in = SafetensorsFiles(model_dir, quantized=quantization is not None)
            self._files = stored_in if quantization is None else QuantizedFiles(stored_in, quantization)
            self.tensors = self._files.tensors

    @property
    def in_gguf(self) -> bool:
        return isinstance(self._files, GGUFFiles)

    def verify(self, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None) -> None:
        """Compares names, shapes and dtypes with what the config implies (`dtype` None: any, but the same for all)."""
        for name, shape in expected.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise StartupError(f"{self.model_dir}: tensor {name} is missing")
            if stored.shape != shape:
                actual, asked = list(stored.shape), list(shape)
                raise StartupError(
                    f"{stored.file.name}: tensor {name} has shape {actual}, config.json requires {asked}"
                )
        for name, stored in list(self.tensors.items()):
            if name not in expected and self._is_no_bias(name):
                del self.tensors[name]
                continue
            if name not in expected:
                raise StartupError(f"{stored.file.name}: tensor {name} does not belong to this model")
            dtype = dtype or stored.dtype
            if stored.dtype not in (dtype, None):
                raise StartupError(f"{stored.file.name}: tensor {name} has dtype {stored.dtype}, expected {dtype}")

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """One tensor, or rows (dimension 0) or columns (dimension 1) of it, as stored. StartupError on NaN or Inf."""
        stored, tensor = self.tensors[name], self._files.read(name, rows, columns)
        if tensor.numel() and not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
            raise StartupError(f"{stored.file.name}: tensor {name} holds NaN or infinite values")
        return tensor

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        """Part of a matrix in its blocks, None if it is not stored in blocks of 32 or the part cuts one. StartupError
        on NaN or Inf."""
        if isinstance(self._files, SafetensorsFiles):
            return None
        try:
            return self._files.blocks(name, rows, columns)
        except ValueError:
            file = self.tensors[name].file.name
            raise StartupError(f"{file}: tensor {name} holds NaN or infinite values") from None

    def _is_no_bias(self, name: str) -> bool:
        """Whether a tensor is the zeros that AutoGPTQ stores as the bias of a layer without one."""
        weight = self.tensors.get(f"{name.removesuffix('.bias')}.weight")
        return name.endswith(".bias") and weight is not None and weight.dtype is None and not self.read(name).any()


def read_model_config(model_dir: Path, model_impl: str = "auto") -> AnyConfig:
    """Reads and checks `config.json` of a checkpoint directory, for the path that `--model-impl` selects."""
    if not model_dir.is_dir():
        raise StartupError(f"{model_dir}: no such model directory")
    return parse_config(parse_config_json(read_small(model_dir / "config.json")), model_impl)


def weight_files(model_dir: Path) -> list[Path]:
    """The files that make up the checkpoint: those of a GGUF model, in order; else the safetensors files."""
    if (index := read_index(model_dir)) is not None:
        return [Path(file) for file in index.files]
    return safetensors_in(model_dir)


def model_digest(model_dir: Path) -> str:
    """xxh3_128 over config.json and all weight bytes, as 32 hex digits: equal exactly for equal checkpoints."""
    digest = xxhash.xxh3_128()
    for file in [model_dir / "config.json", *weight_files(model_dir)]:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(4 << 20):
                digest.update(piece)
    return digest.hexdigest()
