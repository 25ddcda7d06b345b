"""The environment of tests, which is set before any of them imports torch: one thread per library and, without a GPU,
Triton's interpreter."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from baton.runtime.process import limit_name_lookups


def has_cuda() -> bool:
    """Asks CUDA's driver, without torch: a container may have GPUs without the usual device files."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def set_environment() -> None:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

    # Threads of kernels that wait for work would spin, on the cores that other tests need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # otherwise a forked child may abort before its exec
    if not has_cuda():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    limit_name_lookups()

    # Every HTTP client, of which the tests and their processes make thousands, loads all authorities: 20 ms for the
    # usual ones. No test connects to a server that one of them certifies; those with TLS name their own.
    os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).parents[1] / "data" / "authority.pem"))
