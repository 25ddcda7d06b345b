"""Tensors of the Open Inference Protocol, and their binary form: little-endian, row by row; a BYTES element is its
length in 4 bytes and then its bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest

MAX_ELEMENTS = 1 << 16
_FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
DATATYPES = (*_FORMATS, "BYTES")


@dataclass(frozen=True, slots=True)
class Tensor:
    """`values` in row-major order: bool, int, float or, for BYTES, str."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


def checked(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Returns a tensor. Raises InvalidRequest if the parts do not fit together, with `inputs[NAME]` as the field."""
    where = f"inputs[{name[:100]}]"
    count = element_count(name, shape)
    if datatype not in DATATYPES:
        raise InvalidRequest(
            f"datatype {datatype[:40]!r} is not one of {', '.join(DATATYPES)}", param=f"{where}.datatype"
        )
    if len(values) != count:
        raise InvalidRequest(f"{len(values)} values for shape {list(shape)}", param=f"{where}.data")
    if datatype == "BYTES":
        return Tensor(name, datatype, tuple(shape), tuple(_text(value, where) for value in values))
    kinds: tuple[type, ...] = {"B": (bool,), "F": (float, int)}.get(datatype[0], (int,))
    for value in values:
        if not isinstance(value, kinds) or (isinstance(value, bool) and datatype != "BOOL"):
            raise InvalidRequest(f"{value!r:.40} is not a {datatype}", param=f"{where}.data")
    return Tensor(name, datatype, tuple(shape), tuple(values))


def element_count(name: str, shape: Sequence[int]) -> int:
    """Returns how many elements a shape has. Raises InvalidRequest for a negative size and more than MAX_ELEMENTS."""
    if any(not 0 <= size <= MAX_ELEMENTS for size in shape) or (count := math.prod(shape)) > MAX_ELEMENTS:
        param = f"inputs[{name[:100]}].shape"
        raise InvalidRequest(f"'{param}': sizes of at least 0 and at most {MAX_ELEMENTS} elements", param=param)
    return count


def unpacked(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """Returns a tensor from its binary form. Raises InvalidRequest as `checked` does."""
    count, where = element_count(name, shape), f"inputs[{name[:100]}]"
    values: list[Any] = []
    if datatype == "BYTES":
        at = 0
        while at < len(raw) and len(values) < count:
            (size,) = struct.unpack_from("<I", raw, at) if at + 4 <= len(raw) else (len(raw),)
            at += 4 + size
            values.append(raw[at - size : at])
        if at != len(raw):
            raise InvalidRequest("the binary data do not hold the elements of the shape", param=f"{where}.data")
    elif datatype in _FORMATS:
        form = f"<{count}{_FORMATS[datatype]}"
        if len(raw) != struct.calcsize(form):
            message = f"{len(raw)} bytes of data, {struct.calcsize(form)} for this shape and datatype"
            raise InvalidRequest(message, param=f"{where}.data")
        values = list(struct.unpack(form, raw))
    return checked(name, datatype, shape, values)


def packed(tensor: Tensor) -> bytes:
    """Returns the binary form."""
    if tensor.datatype != "BYTES":
        return struct.pack(f"<{len(tensor.values)}{_FORMATS[tensor.datatype]}", *tensor.values)
    encoded = [value.encode() for value in tensor.values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def _text(value: Any, where: str) -> str:
    """BYTES elements are text here."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("BYTES elements must be UTF-8", param=f"{where}.data") from None
    raise InvalidRequest(f"{value!r:.40} is not text", param=f"{where}.data")
