"""Single kernels that only tests call, and the structs of attention.h, sampling.h and draft.cpp that the product fills
field by field without ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_uint32, c_void_p
from typing import Any

from baton.engine.kernels.native import Kernels

STORE, ADD, SWIGLU, FLOAT = range(4)


class Row(ctypes.Structure):
    _fields_ = (("first", c_int64), ("start", c_int64), ("length", c_int64), ("blocks", c_void_p))


class Draw(ctypes.Structure):
    _fields_ = (
        *((name, c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", c_int64),
        *((name, c_uint32) for name in ("key_low", "key_high", "output_index", "choice")),
    )


class Wanted(ctypes.Structure):
    _fields_ = (("draw", Draw), ("row", c_int64), ("count", c_int64))


def fp8(kernels: Kernels, *arguments: Any) -> None:
    function = kernels._library.baton_fp8
    function.argtypes, function.restype = (c_int, c_void_p, c_int64, c_void_p, c_void_p), None
    function(*arguments)
