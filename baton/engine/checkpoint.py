"""A Hugging Face checkpoint directory: which tensor is in which file, and reading slices of them.

`Checkpoint` reads headers only; `verify` compares them with what the model expects; `read` maps one tensor (or a slice
of it) and refuses NaN and Inf. Every problem with a directory is a StartupError of one line that names the file and, if
any, the tensor. Only safetensors and GGUF are read: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.core.errors import StartupError
from baton.core.model_config import ModelConfig, parse_config_json, parse_model_config
from baton.engine.blocks import Blocks
from baton.engine.gguf_files import GGUFFiles, read_index

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # old exports carry the rotary frequencies, which follow from the config


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`name`: in its file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    name: str


class Checkpoint:
    """The tensors of a checkpoint by name. Files are opened once and stay mapped as long as the object exists. Those of
    a model in GGUF (baton.gguf) count as float32."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.tensors: dict[str, StoredTensor]
        self._files: SafetensorsFiles | GGUFFiles
        if (index := read_index(model_dir)) is not None:
            self._files = files = GGUFFiles(index)
            stored = files.index.tensors.items()
            self.tensors = {name: StoredTensor(files.files[t.file], torch.float32, t.shape, name) for name, t in stored}
        else:
            self._files = SafetensorsFiles(model_dir)
            self.tensors = self._files.tensors

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
        for name, stored in self.tensors.items():
            if name not in expected:
                raise StartupError(f"{stored.file.name}: tensor {name} does not belong to this model")
            dtype = dtype or stored.dtype
            if stored.dtype != dtype:
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
        if not isinstance(self._files, GGUFFiles):
            return None
        try:
            return self._files.blocks(name, rows, columns)
        except ValueError:
            file = self.tensors[name].file.name
            raise StartupError(f"{file}: tensor {name} holds NaN or infinite values") from None


class SafetensorsFiles:
    """The tensors of all safetensors files of a directory, by name. Those of a model that was saved without its head
    lack the prefix `model.` in their files."""

    def __init__(self, model_dir: Path) -> None:
        self.tensors = tensors = dict[str, StoredTensor]()
        self._handles: dict[Path, Any] = {}
        weight_map = _weight_map(model_dir)
        for file in weight_files(model_dir):
            handle = self._handles[file] = _open_file(file)
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                if name.endswith(_IGNORED_SUFFIX):
                    continue
                if name in tensors:
                    raise StartupError(f"{file.name}: tensor {name} is also in {tensors[name].file.name}")
                if weight_map is not None and weight_map.get(name) != file.name:
                    indexed = weight_map.get(name, "no file")
                    raise StartupError(f"{_INDEX}: tensor {name} is in {file.name}, but the index names {indexed}")
                part = handle.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise StartupError(f"{file.name}: tensor {name} has unsupported dtype {part.get_dtype()}")
                tensors[name] = StoredTensor(file, dtype, tuple(part.get_shape()), name)
        for name, file_name in (weight_map or {}).items():
            if name not in tensors and not name.endswith(_IGNORED_SUFFIX):
                raise StartupError(f"{file_name}: tensor {name} is missing, but {_INDEX} maps it to this file")
        if "embed_tokens.weight" in tensors:
            bodies = "embed_tokens.", "layers.", "norm."
            named = {f"model.{name}" if name.startswith(bodies) else name: t for name, t in tensors.items()}
            self.tensors = named

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Returns rows and columns of a tensor, or rows of a vector, as stored."""
        stored = self.tensors[name]
        part = self._handles[stored.file].get_slice(stored.name)
        try:
            tensor: Tensor = part[rows] if len(stored.shape) == 1 else part[rows, columns]
        except SafetensorError as error:
            raise StartupError(f"{stored.file.name}: tensor {name}: {_one_line(error)}") from None
        return tensor


def read_model_config(model_dir: Path) -> ModelConfig:
    """Reads and checks `config.json` of a checkpoint directory."""
    if not model_dir.is_dir():
        raise StartupError(f"{model_dir}: no such model directory")
    return parse_model_config(parse_config_json(_read_small(model_dir / "config.json")))


def weight_files(model_dir: Path) -> list[Path]:
    """The files that make up the checkpoint: those of a GGUF model, in order; else safetensors files, sorted by name,
    each a regular file inside the directory."""
    if (index := read_index(model_dir)) is not None:
        return [Path(file) for file in index.files]
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


def model_digest(model_dir: Path) -> str:
    """xxh3_128 over config.json and all weight bytes, as 32 hex digits: equal exactly for equal checkpoints."""
    digest = xxhash.xxh3_128()
    for file in [model_dir / "config.json", *weight_files(model_dir)]:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(4 << 20):
                digest.update(piece)
    return digest.hexdigest()


def _weight_map(model_dir: Path) -> dict[str, str] | None:
    """Tensor name to file name from the index, or None if there is no index."""
    index = model_dir / _INDEX
    if not index.exists():
        return None
    try:
        content = json.loads(_read_small(index))
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


def _open_file(file: Path) -> Any:
    """A safetensors handle. The library checks offsets, sizes and shapes."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file.name}: damaged safetensors file: {_one_line(error)}") from None


def _read_small(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise StartupError(f"{path.name}: not a regular file (in {path.parent})")
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{path.name}: {error.strerror} (in {path.parent})") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
