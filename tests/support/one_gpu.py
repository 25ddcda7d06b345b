"""Where the tests of this folder run: on a CUDA device, or, to rehearse them without one, on the CPU and over Gloo."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

REHEARSAL = os.environ.get("BATON_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"
EDGE_KIND = "gloo" if REHEARSAL else "nccl"
ON_GPU = pytest.mark.gpu(rehearsed=True)


def one_gpu_settings() -> dict[str, Any]:
    """Settings for `tests.support.cluster.cluster` with which workers may share one GPU over NCCL."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "program": (sys.executable, "-m", "tests.support.one_gpu_up"),
        "env": {"PYTHONPATH": path},  # PYTHONSAFEPATH keeps workers from importing from the working directory
        "served_model_name": "m",
        "dtype": "float32",
        "device": DEVICE,
        "edge_kind": EDGE_KIND,
        "kv_memory_gib": 0.1,
    }
