"""The parts of gpu.py, one per process: `python -m benchmarks.gpu_parts NAME`. A part prints Markdown as it runs, and
its rows of the table of bars; it exits with 0 if all its checks passed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu import FAULT, PARTS
from benchmarks.gpu_parts.setting import REHEARSAL, TERMINATED, Checks, Failed


def plant(name: str) -> None:
    """The fault that FAULT plants in this part, if any."""
    planted = dict(entry.split(":") for entry in os.environ.get(FAULT, "").split(",") if entry)
    match planted.get(name):
        case "hang":
            print("made to hang", flush=True)
            time.sleep(3600)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "cuda" if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
            raise Failed("CUDA error: an illegal memory access was encountered (planted)")
        case "fail":
            raise Failed("made to fail")


def functions() -> dict[str, Callable[[Checks], None]]:
    """Imported here, as torch is with them: a part with a planted fault needs neither."""
    from benchmarks.gpu_parts import clusters, eight_b, kernels

    return {
        "environment": kernels.environment,
        "kernel-times": kernels.kernel_times,
        "first-step": eight_b.first_step,
        "first-edge": lambda checks: edges().first(checks),
        "up": clusters.up,
        "tokens": clusters.tokens,
        "kernels": kernels.kernels,
        "graphs": kernels.graphs,
        "8b": eight_b.steps,
        "8b-profile": eight_b.profile_steps,
        "8b-http": eight_b.over_http,
        "edges-ipc": lambda checks: edges().run(checks, "ipc"),
        "edges-nccl": lambda checks: edges().run(checks, "gloo" if REHEARSAL else "nccl"),
        "cluster": clusters.cluster,
        "kill": clusters.kill,
        "engine": kernels.engine,
        "tp2": clusters.two_ranks,
        "transformers": eight_b.transformers,
        "flashinfer": kernels.flashinfer,
    }


def edges() -> Any:
    from benchmarks.gpu_parts import edges  # imports torch

    return edges


def main() -> int:
    name = sys.argv[1]
    if name == "edge-peer":
        return int(edges().peer(*sys.argv[2:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    if name == "compile":
        from benchmarks.gpu_parts import kernels

        return kernels.compile_kernels()
    plant(name)
    parts = functions()
    assert {part.name for part in PARTS} == set(parts)
    checks = Checks()
    parts[name](checks)
    if checks.failed:
        print(f"\nfailed: {', '.join(checks.failed)}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as a worker does: C++ threads of torch may abort a process during a normal exit
