"""Kernels of level `amx` on processors without tiles: the library is compiled for avx512_bf16 with tiles_emulated.h."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from functools import cache

import pytest
import torch

from baton.engine.kernels import native
from baton.engine.kernels.build import can_compile
from baton.engine.kernels.native import Kernels
from tests.support import emulated_tiles

EMULATED = "amx, emulated"
OTHER_ORDER = "amx, emulated in another order"

needs_emulation = pytest.mark.skipif(not can_compile("avx512_bf16"), reason="no avx512_bf16, or no compiler")
emulated_kind = pytest.param(EMULATED, torch.bfloat16, marks=needs_emulation, id=EMULATED)


@cache
def emulated(*, other_order: bool = False) -> Kernels:
    """Compiles and loads kernels with emulated tiles; the library is cached like that of any level."""
    library = str(emulated_tiles.library())
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        if other_order:  # a copy: the same file would be the same library, whose order is known when it is loaded
            library = shutil.copy(library, directory)
            patch.setenv("TILES_OTHER_ORDER", "1")
        patch.setattr(native, "library", lambda level: library)
        return Kernels("amx")


def load(level: str) -> Kernels:
    """`native.load`, extended by the emulated kernels under their names."""
    return emulated(other_order=level == OTHER_ORDER) if level in (EMULATED, OTHER_ORDER) else native.load(level)


def products(kernels: Kernels) -> int:
    """How many products of emulated tiles this thread has computed with these kernels."""
    count = kernels._library.tiles_products
    count.restype = ctypes.c_int64
    return int(count())
