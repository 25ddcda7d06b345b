"""The safetensors files of a checkpoint directory: which tensor is in which file, and reading slices of them.

Every problem with a file is a StartupError of one line that names it and, if any, the tensor. Nothing is unpickled.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.core.errors import StartupError
from baton.runtime.paths import read_regular

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_QUANTIZED = {
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
_FREQUENCIES = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`dtype` is None for a matrix that is stored quantised. `name`: in its file."""

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    name: str


class SafetensorsFiles:
    """The tensors of all safetensors files of a directory, by name; with `quantized`, integers and FP8, too. Those of a
    model that was saved without its head lack the prefix `model.` in their files.

    A file is mapped for each read: the pages of a longer mapping would count as memory of this process, up to the whole
    checkpoint beside the weights (tests/engine/test_load_memory.py).
    """

    def __init__(self, model_dir: Path, *, quantized: bool = False) -> None:
        dtypes = _DTYPES | _QUANTIZED if quantized else _DTYPES
        self.tensors = tensors = dict[str, StoredTensor]()
        weight_map, derived = _weight_map(model_dir), set[str]()
        for file in safetensors_in(model_dir):
            handle = open_file(file)
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                part = handle.get_slice(name)
                if _is_derived(name, part.get_shape()):
                    derived.add(name)
                    continue
                if name in tensors:
                    raise StartupError(f"{file.name}: tensor {name} is also in {tensors[name].file.name}")
                if weight_map is not None and weight_map.get(name) != file.name:
                    indexed = weight_map.get(name, "no file")
                    raise StartupError(f"{_INDEX}: tensor {name} is in {file.name}, but the index names {indexed}")
                dtype = dtypes.get(part.get_dtype())
                if dtype is None:
                    raise StartupError(f"{file.name}: tensor {name} has unsupported dtype {part.get_dtype()}")
                tensors[name] = StoredTensor(file, dtype, tuple(part.get_shape()), name)
        for name, file_name in (weight_map or {}).items():
            if name not in tensors and name not in derived and not name.endswith(_FREQUENCIES):
                raise StartupError(f"{file_name}: tensor {name} is missing, but {_INDEX} maps it to this file")
        if "embed_tokens.weight" in tensors:
            bodies = "embed_tokens.", "layers.", "norm."
            self.tensors = {f"model.{name}" if name.startswith(bodies) else name: t for name, t in tensors.items()}

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Returns rows and columns of a tensor, or rows of a vector, as stored."""
        stored = self.tensors[name]
        try:
            part = open_file(stored.file).get_slice(stored.name)
            tensor: Tensor = part[(rows, columns)[: len(stored.shape)]] if stored.shape else part[...]
        except SafetensorError as error:
            raise StartupError(f"{stored.file.name}: tensor {name}: {_one_line(error)}") from None
        return tensor


def _is_derived(name: str, shape: list[int]) -> bool:
    """Whether a tensor follows from the config: old exports carry the rotary frequencies, or the causal mask of each
    layer, [1, 1, positions, positions], often in a dtype that no weight has (GPT-NeoX's `attention.bias`)."""
    return name.endswith(_FREQUENCIES) or (name.endswith(".bias") and len(shape) == 4)


def has_safetensors(model_dir: Path) -> bool:
    return any((model_dir / name).exists() for name in (_SINGLE, _INDEX))


def safetensors_in(model_dir: Path) -> list[Path]:
    """The safetensors files of a directory, sorted by name, each a regular file inside it."""
    weight_map = _weight_map(model_dir)
    if weight_map is not None:
        return [_regular_file(model_dir, name) for name in sorted(set(weight_map.values()))]
    if (model_dir / _SINGLE).exists() or (model_dir / _SINGLE).is_symlink():
        return [_regular_file(model_dir, _SINGLE)]
    if not model_dir.is_dir():
        raise StartupError(f"{model_dir}: no such model directory")
    if any(path.suffix in (".bin", ".pt", ".pth") for path in model_dir.iterdir()):
        raise StartupError(f"{model_dir}: found only pickled weights (.bin, .pt); Baton reads only safetensors")
    raise StartupError(f"{model_dir}: found neither {_SINGLE} nor {_INDEX}")


def _weight_map(model_dir: Path) -> dict[str, str] | None:
    """Tensor name to file name from the index, or None if there is no index."""
    index = model_dir / _INDEX
    if not index.exists():
        return None
    try:
        content = json.loads(read_small(index))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{_INDEX}: {_one_line(error)}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{_INDEX}: weight_map is missing or empty")
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
            or not file_name.isprintable()  # NUL and lone surrogates, which no path has, and line ends
        ):
            raise StartupError(f"{_INDEX}: tensor {name} is mapped to {file_name!r:.80}, not a .safetensors file name")
    return weight_map


def _regular_file(model_dir: Path, name: str) -> Path:
    """The path of a file in the directory. A link may only point inside it, or into the blobs of the same repository
    in a huggingface_hub cache (…/snapshots/REVISION/name -> ../../blobs/…)."""
    path = model_dir / name
    try:
        mode = path.stat().st_mode
        target = path.resolve(strict=True)
    except OSError as error:
        raise StartupError(f"{name}: {error.strerror} (in {model_dir})") from None
    if not stat.S_ISREG(mode):
        raise StartupError(f"{name}: not a regular file (in {model_dir})")
    home = model_dir.resolve()
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(root) for root in roots):
        raise StartupError(f"{name}: symbolic link points outside the model directory {model_dir}")
    return path


def open_file(file: Path) -> Any:
    """A safetensors handle. The library checks offsets, sizes and shapes."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file.name}: damaged safetensors file: {_one_line(error)}") from None


def read_small(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise StartupError(f"{path.name}: {error.strerror} (in {path.parent})") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
