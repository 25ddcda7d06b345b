"""The library of kernels of level `amx` for processors without tiles, which tests/engine/tiles_emulated.h emulates.

`python -m tests.support.emulated_tiles` compiles it. It needs no package, so make does that while pip installs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.engine.kernels import build

_HEADER = Path(__file__).resolve().parents[1] / "engine" / "tiles_emulated.h"


def library() -> Path:
    """From the cache or compiled now, as that of any level. Raises CannotBuild."""
    header = hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:16]
    own = build._TARGETS["amx"]
    build._TARGETS["amx"] = (*build._TARGETS["avx512_bf16"], "-include", str(_HEADER), f"-DTILES_HEADER=0x{header}")
    try:
        return build.library("amx")
    finally:
        build._TARGETS["amx"] = own


if __name__ == "__main__" and build.can_compile("avx512_bf16"):
    print(f"kernels: {library()}")
