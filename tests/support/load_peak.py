"""The memory that a rank takes at most while it loads, as JSON: [peak in bytes, bytes of its part of the weights].

    python -m tests.support.load_peak HOW TINY LARGE RANK SIZE

HOW is the level of Baton's kernels, or `transformers`. The peak is what the load of LARGE adds, after that of TINY.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import torch

from baton.core.ranks import Ranks
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kernels.native import load
from baton.engine.loading import load_runner
from baton.engine.model_native import NativeModel
from baton.engine.options import EngineOptions
from baton.engine.parallel import TPGroup, open_store
from baton.engine.weights import WeightReader

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_RETURNED = 65536
"""By default glibc raises these limits as it runs, and keeps memory that was freed: now 10 MiB more, now none; of the
pieces of a large head up to 150."""


def return_freed_memory() -> None:
    """Makes the C library return what is freed at once, so that only what is held counts."""
    libc = ctypes.CDLL(None)
    assert all(libc.mallopt(limit, _RETURNED) for limit in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))


def in_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


def by_baton(level: str, directory: Path, rank: int, size: int) -> tuple[object, int]:
    """The model, without a runner, and the bytes of its part."""
    config, group = read_model_config(directory), TPGroup(rank, size)
    reader = WeightReader(Checkpoint(directory), config, group, torch.bfloat16, torch.device("cpu"))
    reader.in_blocks = True
    return NativeModel(config, reader, group, load(level), 64, 1), reader.bytes_read


def by_transformers(_: str, directory: Path, rank: int, size: int) -> tuple[object, int]:
    chosen = {"model_impl": "transformers", "device": "cpu", "dtype": "bfloat16", "kv_memory_bytes": 8 << 20}
    store = open_store(os.environ) if size > 1 else None
    runner = load_runner(EngineOptions(model_dir=directory, **chosen), ranks=Ranks(rank, size, rank, size), store=store)
    return runner, runner.parameter_bytes


def main() -> None:
    how, tiny, large, rank, size = sys.argv[1:]
    build = by_transformers if how == "transformers" else by_baton
    return_freed_memory()
    torch.set_num_threads(1)
    build(how, Path(tiny), 0, 1)  # allocates what is allocated once
    before = in_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    _loaded, part = build(how, Path(large), int(rank), int(size))
    print(json.dumps([in_status("VmHWM") - before, part]))


if __name__ == "__main__":
    main()
