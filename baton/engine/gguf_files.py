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
from baton.engine.blocks import BLOCK, Blocks
from baton.engine.kernels.build import CannotBuild, cache_dir
from baton.models.gguf_index import INDEX, GGUFIndex, StoredInGGUF

_BLOCKS = {"Q8_0": (34, 2), "Q4_0": (18, 2), "Q4_1": (20, 4), "Q4_K": (144, 16)}
"""Types whose matrices can be computed from their blocks: bytes of a block, and those before its codes."""
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

    def blocks(self, name: str, rows: slice, columns: slice) -> Blocks | None:
        """Returns rows and columns of a matrix in its blocks; None for other types, or columns that cut a block.
        Raises ValueError if a scale is NaN or infinite."""
        stored = self.index.tensors[name]
        if stored.kind not in _BLOCKS or len(stored.shape) == 1:
            return None
        first, last, _ = columns.indices(stored.shape[1])
        if first % BLOCK or last % BLOCK:
            return None
        size = self._row_bytes(stored)
        packed = self._mapped[stored.file][stored.offset : stored.offset + size * _rows(stored)]
        picked = np.ascontiguousarray(packed.reshape(_rows(stored), size)[_row_numbers(stored)[rows]])
        codes, *factors = self._split(stored.kind, picked)
        within = slice(first // BLOCK, last // BLOCK)
        tensors = [torch.from_numpy(np.ascontiguousarray(values[:, within])) for values in factors]
        return Blocks(torch.from_numpy(np.ascontiguousarray(codes[:, columns])), *tensors)

    def _split(self, kind: str, packed: _Bytes) -> tuple[Any, ...]:
        """Returns the codes [rows, columns], and the scales and minima [rows, blocks] of whole rows (see ggml's
        block_q8_0, block_q4_0, block_q4_1 and block_q4_K)."""
        rows = len(packed)

        def halves(values: _Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
            return np.ascontiguousarray(values).view(np.float16).astype(np.float32)

        def nibbles(values: _Bytes) -> _Bytes:
            """[..., n] -> [..., 2 n]: the lower halves of all bytes, then the upper ones."""
            return np.concatenate([values & 15, values >> 4], axis=-1)

        if kind == "Q4_K":
            blocks = packed.reshape(rows, -1, 144)
            scales, minima = self._gguf.quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
            factors = halves(blocks[..., :4])
            by_eight = (scales.reshape(rows, -1, 8), minima.reshape(rows, -1, 8))
            scale, minimum = (factors[..., i, None] * by_eight[i].astype(np.float32) for i in (0, 1))
            codes = nibbles(blocks[..., 16:].reshape(rows, -1, 4, BLOCK))
            return codes.reshape(rows, -1), scale.reshape(rows, -1), -minimum.reshape(rows, -1)
        size, header = _BLOCKS[kind]
        blocks = packed.reshape(rows, -1, size)
        factors = halves(blocks[..., :header])
        if kind == "Q8_0":
            return blocks[..., header:].view(np.int8).reshape(rows, -1), factors[..., 0]
        minimum = factors[..., 1] if kind == "Q4_1" else -8 * factors[..., 0]
        return nibbles(blocks[..., header:]).reshape(rows, -1), factors[..., 0], minimum

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
