"""How transformers reads a checkpoint here: one tensor after another, each through a mapping of its own.

transformers maps whole files, and a bf16 model's parameters are then views of these mappings: all pages that were ever
read count as memory of the process as long as one parameter is left, beside what was packed or converted from them. A
mapping of its own ends with its tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import modeling_utils

from baton.engine.safetensors_files import StoredTensor, open_file

_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
"""Else threads read and convert ahead of what is needed next."""


class _Tensor:
    """A tensor of a checkpoint, which is read like a slice of safetensors."""

    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        shape: list[int] = open_file(self._file).get_slice(self._name).get_shape()
        return shape

    def __getitem__(self, where: Any) -> Tensor:
        tensor: Tensor = open_file(self._file).get_slice(self._name)[where]
        return tensor


@contextmanager
def reading_one_by_one(tensors: Mapping[str, StoredTensor]) -> Iterator[None]:
    """A model that transformers loads meanwhile is read in this way; `tensors` are those of its checkpoint."""
    convert = modeling_utils.convert_and_load_state_dict_in_model
    files = {stored.name: stored.file for stored in tensors.values()}

    def convert_mapped(model: Any, state_dict: Mapping[str, Any], load_config: Any, **options: Any) -> Any:
        mapped = {name: _Tensor(files[name], name) if name in files else each for name, each in state_dict.items()}
        return convert(model=model, state_dict=mapped, load_config=load_config, **options)

    before = os.environ.get(_IN_ORDER)
    modeling_utils.convert_and_load_state_dict_in_model = convert_mapped
    os.environ[_IN_ORDER] = "1"
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = convert
        if before is None:
            del os.environ[_IN_ORDER]
        else:
            os.environ[_IN_ORDER] = before
