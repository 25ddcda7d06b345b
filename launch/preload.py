"""What a rank imports, imported once in its agent, so that each life of the rank is a fork and costs milliseconds.

A fork copies the calling thread alone: a lock that another one holds, or a pool of threads that a library counts on,
would be lost. So the agent only imports; it computes nothing, opens no channel and touches no GPU (importing torch does
not initialise CUDA, which could not be used after a fork), and what it became is looked at before it is used. Where it
will not do, each life imports for itself, and the log says why.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence

from baton.process import lasting_imports

_OWN = ("baton", "launch")
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class PreloadRefused(Exception):
    """Why this process cannot be what ranks are forked from."""


class Preloaded:
    """The modules, in memory, and what their files were like when they were read. `open_before` are the descriptors
    that are the agent's own, and not of what it imported."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises PreloadRefused. What was imported by then stays."""
        self.open_before = _open_files()
        try:
            with lasting_imports():
                _import_numpy()
                for name in names:
                    importlib.import_module(name)
        except BaseException as error:  # also a module that ends the process: that is for the rank to do
            raise PreloadRefused(f"{type(error).__name__}: {error}") from None
        wrong = unforkable()
        if wrong:
            raise PreloadRefused(wrong)
        self._read = dict(_files({*_OWN, *(name.partition(".")[0] for name in names)}))

    def stale(self) -> str:
        """A file that is another one than was imported (somebody installed a new version), or nothing. Looked at are
        the modules of the packages that were named, and the roots of all others."""
        return next((path for path, before in self._read.items() if _signature(path) != before), "")


def unforkable() -> str:
    """Why a fork of this process would be no whole one, or nothing."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads run after the imports, and a fork takes one along"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports have initialised CUDA, which cannot be used after a fork"
    return ""


def _open_files() -> tuple[int, ...]:
    """Those above standard error, without the one that they are listed through: what is imported may get its number."""
    listed = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    return tuple(number for number in listed if number > 2 and os.path.lexists(f"/proc/self/fd/{number}"))


def _import_numpy() -> None:
    """torch imports it. Its BLAS, which Baton does not use, starts its threads as it is loaded."""
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")
    finally:
        del os.environ[_BLAS_THREADS]
        if before is not None:
            os.environ[_BLAS_THREADS] = before


def _files(packages: set[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, module in list(sys.modules.items()):
        root, dot, _ = name.partition(".")
        path = getattr(module, "__file__", None)
        if path and (not dot or root in packages):
            yield path, _signature(path)


def _signature(path: str) -> tuple[int, int]:
    """Zeros for a file that is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
