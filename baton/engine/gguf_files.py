"""The tensors of a model in GGUF, dequantised as the `gguf` package does, under their Hugging Face names.

Only the rows asked for are read and dequantised. Files are mapped once and stay mapped as long as the object exists.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.gguf_index import INDEX, GGUFIndex, StoredInGGUF
from baton.engine.kernels.build import CannotBuild, cache_dir

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def read_index(model_dir: Path) -> GGUFIndex | None:
    """Returns the index of a directory that baton.gguf derived; None for any other. Only in our own cache does an index
    count: one in a downloaded checkpoint could name any file of this machine."""
    try:
        if model_dir.parent != cache_dir() / "gguf":
            return None
        return GGUFIndex.parse((model_dir / INDEX).read_bytes())
    except (CannotBuild, FileNotFoundError):
        return None


class GGUFFiles:
    """Raises StartupError if a file of the index is missing or shorter than the index says."""

    def __init__(self, index: GGUFIndex) -> None:
        self.index = index
        self.files = [Path(file) for file in self.index.files]
        try:
            self._mapped = [np.memmap(file, dtype=np.uint8, mode="r") for file in self.files]
        except (OSError, ValueError) as error:
            raise StartupError(f"model in GGUF: {error}") from None
        for name, stored in self.index.tensors.items():
            file, end = self.files[stored.file], stored.offset + self._row_bytes(stored) * _rows(stored)
            if end > len(self._mapped[stored.file]):
                raise StartupError(f"{file.name}: tensor {name} ends beyond the file: it is not complete")

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns rows and columns of a tensor, or rows of a vector, in float32."""
        stored = self.index.tensors[name]
        size = self._row_bytes(stored)
        packed = self._mapped[stored.file][stored.offset : stored.offset + size * _rows(stored)]
        if len(stored.shape) == 1:
            return torch.from_numpy(self._dequantized(packed, stored)[_row_numbers(stored)[rows]])
        picked = packed.reshape(_rows(stored), size)[_row_numbers(stored)[rows]]
        return torch.from_numpy(self._dequantized(picked, stored))[:, columns].contiguous()

    def _dequantized(self, packed: _Bytes, stored: StoredInGGUF) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = self._gguf.dequantize(np.ascontiguousarray(packed), self._gguf.GGMLQuantizationType[stored.kind])
        return np.asarray(values, dtype=np.float32)

    @cached_property
    def _gguf(self) -> Any:
        import gguf

        return gguf

    def _row_bytes(self, stored: StoredInGGUF) -> int:
        block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType[stored.kind]]
        return int(stored.shape[-1] // block * size)


def _rows(stored: StoredInGGUF) -> int:
    return stored.shape[0] if len(stored.shape) > 1 else 1


def _row_numbers(stored: StoredInGGUF) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Returns where each row of the Hugging Face tensor is in the stored one."""
    numbers = np.arange(stored.shape[0])
    if stored.rope_heads:
        numbers = numbers.reshape(stored.rope_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return numbers
