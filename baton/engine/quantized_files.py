"""The tensors of a checkpoint with quantised weights (quantization_config.py), under their usual names.

    weight = (integer - zero point) * scale        FP8: weight = value * scale

in float32, where the product is exact if scales are bf16 or fp16. A part of a matrix is read from parts of the tensors
that it is stored in: no rank reads others' weights, except those in the same 32-bit words as its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.blocks import BLOCK, Blocks, is_half
from baton.engine.safetensors_files import SafetensorsFiles
from baton.models.quantization_config import QuantizationConfig, Scheme

_VALUES = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "plain": "weight"}
_ZEROS = {"gptq": "qzeros", "awq": "qzeros", "packed": "weight_zero_point", "plain": "weight_zero_point"}
_GROUPS = {"gptq": "g_idx", "awq": "", "packed": "weight_g_idx", "plain": ""}
_SHAPE = "weight_shape"
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "q_scale", "k_scale", "v_scale")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of 8 neighbouring outputs is
_OFFSET = {4: 0x11111111, 8: 0x01010101}  # one for each integer of a word
_ROWS_AT_ONCE = 1 << 20  # weights; bounds the memory of intermediate values


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A quantised weight [outputs, inputs] and the names of its tensors; `group` has the group of each input."""

    scheme: Scheme
    outputs: int
    inputs: int
    values: str
    scales: str
    zeros: str
    group: str


class QuantizedFiles:
    """The tensors of `files`, with each quantised weight in place of those that it is stored in. What quantises
    activations is left out.

    Raises StartupError if a tensor that a weight needs is missing, or has another shape or dtype than its scheme says.
    """

    def __init__(self, files: SafetensorsFiles, config: QuantizationConfig) -> None:
        self._files = files
        self._matrices = dict[str, _Matrix]()
        self.tensors = {
            name: stored for name, stored in files.tensors.items() if name.rpartition(".")[2] not in _OF_ACTIVATIONS
        }
        for name, stored in files.tensors.items():
            module, _, kind = name.rpartition(".")
            is_plain = kind == "weight" and stored.dtype in (torch.int8, torch.float8_e4m3fn)
            if not is_plain and kind not in ("qweight", "weight_packed"):
                continue
            scheme = config.scheme(module)
            if scheme is None or _VALUES[scheme.storage] != kind:
                reason = "says that it is not" if config.ignores(module) else f"of {config.method} has no such tensor"
                raise StartupError(f"{stored.file.name}: tensor {name} is quantised, quantization_config {reason}")
            matrix = self._matrix(module, scheme)
            for used in (matrix.values, matrix.scales, matrix.zeros, matrix.group, f"{module}.{_SHAPE}"):
                self.tensors.pop(used, None)
            self._matrices[f"{module}.weight"] = matrix
            self.tensors[f"{module}.weight"] = replace(stored, dtype=None, shape=(matrix.outputs, matrix.inputs))

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Returns rows and columns of a tensor, or rows of a vector: as stored, or dequantised to float32."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._files.read(name, rows, columns)
        values, scales, zeros, group = self._part(matrix, rows, columns)
        weight = torch.empty(values.shape, dtype=torch.float32)
        step = max(_ROWS_AT_ONCE // values.shape[1], 1)
        for first in range(0, len(values), step):
            some = slice(first, first + step)
            part = torch.sub(values[some].float(), zeros[some].index_select(1, group))
            torch.mul(part, scales[some].index_select(1, group), out=weight[some])
        return weight

    def blocks(self, name: str, rows: slice, columns: slice) -> Blocks | None:
        """Returns rows and columns of a matrix of integers in blocks of 32 inputs; None if it is stored in another way,
        if groups or columns cut a block, or if its scales or zero points have no place in a block.
        Raises ValueError if a scale is NaN or infinite."""
        matrix = self._matrices.get(name)
        if matrix is None or self._dtype(matrix.values) == torch.float8_e4m3fn:
            return None
        first, last, _ = columns.indices(matrix.inputs)
        if first % BLOCK or last % BLOCK or self._dtype(matrix.scales) == torch.float32:
            return None
        values, scales, zeros, group = self._part(matrix, rows, columns)
        of_blocks = group[::BLOCK]
        if not torch.equal(group, of_blocks.repeat_interleave(BLOCK)):
            return None
        scales, zeros = scales[:, of_blocks], zeros[:, of_blocks]
        if matrix.scheme.bits == 4:
            return Blocks(values.contiguous(), scales, zeros * -scales)
        middle = 0 if values.dtype == torch.int8 else 128
        if not (zeros == middle).all() or not is_half(scales):
            return None
        return Blocks((values.short() - middle).to(torch.int8), scales)

    def _part(self, matrix: _Matrix, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns values [n, k], scales and zero points [n, groups] in float32, and the group of each of k inputs."""
        top, bottom, _ = rows.indices(matrix.outputs)
        first, last, _ = columns.indices(matrix.inputs)
        group = self._group(matrix, first, last)
        groups = slice(int(group.min()), int(group.max()) + 1)
        scales = self._scales(matrix, matrix.scales, top, bottom, groups)
        zeros = self._zeros(matrix, top, bottom, groups)
        return self._values(matrix, top, bottom, first, last), scales, zeros.expand_as(scales), group - groups.start

    def _group(self, matrix: _Matrix, first: int, last: int) -> Tensor:
        if matrix.group in self._files.tensors:
            group = self._files.read(matrix.group, slice(first, last)).long()
            if group.min() < 0 or group.max() >= _groups(matrix):
                raise self._error(matrix.group, f"has numbers that are not from 0 to {_groups(matrix) - 1}")
            return group
        return torch.arange(first, last) // (matrix.scheme.inputs or matrix.inputs)

    def _values(self, matrix: _Matrix, top: int, bottom: int, first: int, last: int) -> Tensor:
        """Returns integers [n, k] in uint8 or int8, or FP8."""
        bits, rows = matrix.scheme.bits, slice(top, bottom)
        match matrix.scheme.storage:
            case "gptq":  # words [inputs / 8, outputs]
                words, begin = self._words(matrix.values, bits, 0, first, last, rows)
                return _unpacked(words.T, bits)[:, begin : begin + last - first]
            case "awq":  # words [inputs, outputs / 8]
                words, begin = self._words(matrix.values, bits, 1, top, bottom, slice(first, last))
                return _in_awq_order(_unpacked(words, bits))[:, begin : begin + bottom - top].T
            case "packed":  # words [outputs, inputs / 8]
                words, begin = self._words(matrix.values, bits, 1, first, last, rows)
                return _unpacked(words, bits)[:, begin : begin + last - first]
            case "plain":
                return self._files.read(matrix.values, rows, slice(first, last))

    def _zeros(self, matrix: _Matrix, top: int, bottom: int, groups: slice) -> Tensor:
        """Returns zero points [n, groups] in float32, or one for all."""
        bits, storage = matrix.scheme.bits, matrix.scheme.storage
        if storage == "plain":
            if matrix.scheme.symmetric:
                return torch.zeros(1)
            return self._scales(matrix, matrix.zeros, top, bottom, groups)
        if matrix.scheme.symmetric:
            return torch.full((1,), float(1 << bits - 1))
        # [groups, outputs / 8], in compressed-tensors the other way round
        axis = 0 if storage == "packed" else 1
        words, begin = self._words(matrix.zeros, bits, axis, top, bottom, groups)
        if matrix.scheme.offset_zeros:
            words = words + _OFFSET[bits]
        zeros = _unpacked(words if axis else words.T, bits)
        if storage == "awq":
            zeros = _in_awq_order(zeros)
        return zeros[:, begin : begin + bottom - top].T.float()

    def _scales(self, matrix: _Matrix, name: str, top: int, bottom: int, groups: slice) -> Tensor:
        """Returns scales, or zero points in the same places, [n, groups] in float32."""
        scheme = matrix.scheme
        if scheme.storage in ("gptq", "awq"):
            return self._files.read(name, groups, slice(top, bottom)).T.float()
        of_outputs = torch.arange(top, bottom) // (scheme.outputs or matrix.outputs)
        if len(self._files.tensors[name].shape) < 2:  # one for all, or one for each output
            return self._files.read(name).float().reshape(-1, 1)[of_outputs]
        first, last = int(of_outputs[0]), int(of_outputs[-1]) + 1
        return self._files.read(name, slice(first, last), groups).float()[of_outputs - first]

    def _words(self, name: str, bits: int, axis: int, first: int, last: int, unpacked: slice) -> tuple[Tensor, int]:
        """Reads the 32-bit words with integers [first, last) of the packed axis; returns them, and which is the first
        of its word."""
        per_word = 32 // bits
        packed = slice(first // per_word, -(-last // per_word))
        words = self._files.read(name, *((packed, unpacked) if axis == 0 else (unpacked, packed)))
        return words, first % per_word

    def _matrix(self, module: str, scheme: Scheme) -> _Matrix:
        """Returns a weight whose tensors have the shapes and dtypes of the scheme."""
        values, zeros, group = (f"{module}.{names[scheme.storage]}" for names in (_VALUES, _ZEROS, _GROUPS))
        per_word, stored = 32 // scheme.bits, self._files.tensors[values]
        if len(stored.shape) != 2:
            raise self._error(values, f"has shape {list(stored.shape)}, not two dimensions")
        outputs, inputs = stored.shape
        match scheme.storage:
            case "gptq":
                outputs, inputs = inputs, outputs * per_word
            case "awq":
                outputs, inputs = inputs * per_word, outputs
            case "packed":
                self._check(f"{module}.{_SHAPE}", [(2,)], (torch.int64, torch.int32))
                outputs, inputs = self._files.read(f"{module}.{_SHAPE}").tolist()
                self._check(values, [(outputs, -(-inputs // per_word))], (torch.int32,))
        if scheme.storage != "plain":
            self._check(values, [stored.shape], (torch.int32,))
        matrix = _Matrix(scheme, outputs, inputs, values, f"{module}.{scheme.scale_name}", zeros, group)
        groups = _groups(matrix)
        shape = (groups, outputs)
        if scheme.storage in ("packed", "plain"):
            shape = (-(-outputs // scheme.outputs) if scheme.outputs else 1, groups)
        shapes = [shape, *([shape[:1]] if groups == 1 else []), *([()] if shape == (1, 1) else [])]
        self._check(matrix.scales, shapes, _FLOATS)
        if not scheme.symmetric:
            words = (groups, -(-outputs // per_word))
            match scheme.storage:
                case "plain":
                    self._check(zeros, shapes, (torch.int8,))
                case "packed":
                    self._check(zeros, [words[::-1]], (torch.int32,))
                case _:
                    self._check(zeros, [words], (torch.int32,))
        if group in self._files.tensors:
            self._check(group, [(inputs,)], (torch.int32,))
        return matrix

    def _check(self, name: str, shapes: list[tuple[int, ...]], dtypes: tuple[torch.dtype, ...]) -> None:
        stored = self._files.tensors.get(name)
        if stored is None:
            raise StartupError(f"tensor {name} is missing, which quantization_config requires")
        if stored.shape not in shapes:
            raise self._error(name, f"has shape {list(stored.shape)}, quantization_config requires {list(shapes[0])}")
        if stored.dtype not in dtypes:
            raise self._error(name, f"has dtype {stored.dtype}, expected {' or '.join(map(str, dtypes))}")

    def _dtype(self, name: str) -> torch.dtype | None:
        return self._files.tensors[name].dtype

    def _error(self, name: str, reason: str) -> StartupError:
        return StartupError(f"{self._files.tensors[name].file.name}: tensor {name} {reason}")


def _groups(matrix: _Matrix) -> int:
    return -(-matrix.inputs // matrix.scheme.inputs) if matrix.scheme.inputs else 1


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[n, w] in int32 -> [n, w * 32 / bits] in uint8, the lowest bits of a word first."""
    values = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return values if bits == 8 else torch.stack([values & 15, values >> 4], dim=-1).flatten(1)


def _in_awq_order(values: Tensor) -> Tensor:
    return values.view(len(values), -1, 8)[:, :, _AWQ_ORDER].flatten(1)
