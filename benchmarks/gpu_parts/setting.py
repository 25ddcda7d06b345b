"""What the parts of gpu.py share: checks, bars, times. With BATON_REHEARSE=1 they run on the CPU, on tiny shapes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from benchmarks.gpu import BAR, EDGE_KIND, ROOT

REHEARSAL, QUICK = (os.environ.get(f"BATON_REHEARSE{more}") == "1" for more in ("", "_QUICK"))
DEVICE = "cpu" if REHEARSAL else "cuda"
TERMINATED = 128 + signal.SIGTERM


class Failed(Exception):
    """A check failed; the rest of the part still runs where possible."""


class Checks:
    """Runs the steps of a part one by one; a step that fails does not stop the others."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code == TERMINATED:
                raise
            self.failed.append(name)
            print(f"- **{name}: failed**: {type(error).__name__}: {str(error).strip()[:2000]}")
            if not isinstance(error, Failed):
                traceback.print_exc(limit=-12)
        else:
            print(f"- {name}: ok, {time.monotonic() - started:.1f} s")


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def bar(name: str, measured: str, limit: str, met: bool) -> None:
    """A row of the table of bars; the name is one of the part's `bars` in gpu.py."""
    row = {"name": name, "measured": measured, "limit": limit, "met": "yes" if met else "**no**"}
    print(f"{BAR}{json.dumps(row)}", flush=True)


def edge_kind() -> str:
    """The kind of edge of a part that uses NCCL, unless NCCL has failed before."""
    return os.environ.get(EDGE_KIND) or ("gloo" if REHEARSAL else "nccl")


def synchronize() -> None:
    import torch

    if not REHEARSAL:
        torch.cuda.synchronize()


def median_s(work: Callable[[], object], repeat: int, inner: int = 1) -> float:
    """Median seconds of `work`, the device idle before and after each `inner` calls."""
    inner = 1 if REHEARSAL else inner
    times = []
    for _ in range(repeat + 2):
        synchronize()
        started = time.perf_counter()
        for _ in range(inner):
            work()
        synchronize()
        times.append((time.perf_counter() - started) / inner)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes per second read and written by a large copy."""
    import torch

    source = torch.empty(64 << 20 if REHEARSAL else 4 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), 5)


def matrix_rate() -> float:
    """FLOP per second of a square bf16 product."""
    import torch

    size = 256 if REHEARSAL else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_s(lambda: a @ b, 10)


def pytest(path: str, named: str = "") -> None:
    """Runs the tests of `path`, or those that match `named`, without plugins; unknown settings of pyproject.toml are
    ignored."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["-p", "no:asyncio"]  # the machine may lack the plugin; the tests of tests/gpu do not need it
    process = subprocess.Popen(
        [*command, "-v", "--durations=8", "-m", "gpu", "-k", named, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    last = ""
    for line in process.stdout or ():
        last = line.strip() or last
        print(f"    {line.rstrip()}")
    code = process.wait()
    check(code == 0, f"pytest {path} ended with {code}")
    check(bool(re.search(r"\b\d+ passed", last)), f"pytest {path} ran no test: {last}")
