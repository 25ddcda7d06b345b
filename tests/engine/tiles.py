"""Kernels of level `amx` on processors without tiles: the library is compiled for avx512_bf16 with tiles_emulated.h."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.engine.kernels import build, native
from baton.engine.kernels.build import can_compile
from baton.engine.kernels.native import Kernels

EMULATED = "amx, emulated"
OTHER_ORDER = "amx, emulated in another order"
_DEFINES: dict[str, tuple[str, ...]] = {EMULATED: (), OTHER_ORDER: ("TILES_OTHER_ORDER",)}
_HEADER = Path(__file__).with_name("tiles_emulated.h")

needs_emulation = pytest.mark.skipif(not can_compile("avx512_bf16"), reason="no avx512_bf16, or no compiler")
emulated_kind = pytest.param(EMULATED, torch.bfloat16, marks=needs_emulation, id=EMULATED)


@cache
def emulated(*defines: str) -> Kernels:
    """Compiles and loads kernels with emulated tiles; the library is cached like that of any level."""
    header = hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:16]
    flags = ("-include", str(_HEADER), f"-DTILES_HEADER=0x{header}", *(f"-D{name}" for name in defines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build._TARGETS, "amx", (*build._TARGETS["avx512_bf16"], *flags))
        return Kernels("amx")


def load(level: str) -> Kernels:
    """`native.load`, extended by the emulated kernels under their names."""
    return emulated(*_DEFINES[level]) if level in _DEFINES else native.load(level)


def products(kernels: Kernels) -> int:
    """How many products of emulated tiles this thread has computed with these kernels."""
    count = kernels._library.tiles_products
    count.restype = ctypes.c_int64
    return int(count())
