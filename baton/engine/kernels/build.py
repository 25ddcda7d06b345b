"""Compiles the C++ kernels for this processor once: by `python -m baton.engine.kernels.build` or in the first worker.

The result is a shared library with a C interface (no torch, no Python headers: it compiles in seconds and serves every
version of both), kept in the user's cache under a name that contains a hash of sources, flags and compiler. Processes
that start at the same time wait for the one that compiles. The library is written to a temporary directory and renamed,
so that no process ever loads a partial file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LEVELS = ("avx2", "avx512", "avx512_bf16", "amx")
"""The instruction-set levels that kernels are compiled for, in rising order; the index is BATON_LEVEL in C++."""

BLOCK_LEVELS = ("avx512_bf16", "amx")
"""Those that compute from weights in blocks, in bf16."""

CACHE_VARIABLE = "BATON_CACHE_DIR"
COMPILE_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 330.0
"""How long to wait for another process that is compiling."""

_SOURCES = Path(__file__).parent / "cpu"
_BASE = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "avx2")
_NEEDED = {  # flags as /proc/cpuinfo writes them
    "avx2": ("avx2", "fma"),
    "avx512": _BASE,
    "avx512_bf16": (*_BASE, "avx512_bf16", "avx512_vnni"),
    "amx": (*_BASE, "avx512_bf16", "amx_tile", "amx_bf16"),
}
_TARGETS = {  # the compiler writes avx512bf16 and amx-tile
    level: tuple("-m" + flag.replace("avx512_", "avx512").replace("_", "-") for flag in flags)
    for level, flags in _NEEDED.items()
}
# -ffp-contract=off: no implicit fused multiply-add; products and sums are rounded as the source says.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")


class CannotBuild(Exception):
    """There are no compiled kernels, for the given reason; with `auto`, torch's own are used instead."""


def processor_levels(cpuinfo: str | None = None) -> tuple[str, ...]:
    """The LEVELS that this processor (or the one that `cpuinfo` describes) supports."""
    flags = set(_line(_cpuinfo() if cpuinfo is None else cpuinfo, "flags").split())
    return tuple(level for level in LEVELS if flags.issuperset(_NEEDED[level]))


def fastest_level(cpuinfo: str | None = None) -> str | None:
    """The fastest of `processor_levels`: the last one, except `avx512` on Intel processors with avx512_bf16 but without
    AMX, which multiply bf16 at half the rate of float32 (decision 0014)."""
    if cpuinfo is None:
        cpuinfo = _cpuinfo()
    levels = processor_levels(cpuinfo)
    if levels[-1:] == ("avx512_bf16",) and "GenuineIntel" in _line(cpuinfo, "vendor_id"):
        return "avx512"
    return levels[-1] if levels else None


def _cpuinfo() -> str:
    known = platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists()
    return Path("/proc/cpuinfo").read_text() if known else ""


def _line(cpuinfo: str, name: str) -> str:
    """The first line that starts with `name`, or an empty string."""
    return next((line for line in cpuinfo.splitlines() if line.startswith(name)), "")


def can_compile(level: str) -> bool:
    """Whether the processor supports `level`, and a compiler and a cache directory are available."""
    try:
        cache_dir()
    except CannotBuild:
        return False
    return level in processor_levels() and shutil.which(_compiler()) is not None


def level_of(kernels: str) -> str | None:
    """Returns the level that `--kernels` selects on this machine's CPU, without compiling anything; None: torch's."""
    level = fastest_level() if kernels == "auto" else kernels
    return level if level in LEVELS and can_compile(level) else None


def library(level: str) -> Path:
    """The library of kernels for `level`, from the cache or compiled now. Raises CannotBuild."""
    compiler = _compiler()
    path = shutil.which(compiler)
    if path is None:
        raise CannotBuild(f"no C++ compiler ({compiler} is not installed; set CXX to use another)")
    target = cache_dir() / f"kernels-{level}-{_key(level, path)}.so"
    if target.exists():
        return target
    with _alone(target.with_suffix(".lock")):
        if not target.exists():
            _compile(path, level, target)
    return target


def cache_dir() -> Path:
    """BATON_CACHE_DIR, else `baton` in the user's cache; writable by this user only, because code is loaded from it."""
    named = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(named) if named else Path(home) / "baton"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.stat()
    except OSError as error:
        raise CannotBuild(f"cache {path}: {error.strerror}; set BATON_CACHE_DIR to use another") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CannotBuild(f"cache {path} is writable by other users; set BATON_CACHE_DIR to use another")
    return path


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _key(level: str, compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted((*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    status = Path(compiler).stat()
    digest.update(repr((_FLAGS, _TARGETS[level], compiler, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str, level: str, target: Path) -> None:
    print(f"compiling the kernels for {level} (once; cached in {target.parent})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / "kernels.so"
        where = f"-DBATON_LEVEL={LEVELS.index(level)}"
        sources = map(str, sorted(_SOURCES.glob("*.cpp")))
        command = [compiler, *_FLAGS, *_TARGETS[level], where, "-o", str(made), *sources]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuild(f"{compiler}: {str(error)[:200]}") from None
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise CannotBuild(f"{compiler} failed: {(errors or done.stderr.splitlines() or ['?'])[0][:200]}")
        os.replace(made, target)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    try:
        handle = lock.open("w")
    except OSError as error:
        raise CannotBuild(f"{lock}: {error.strerror}; set BATON_CACHE_DIR to use another directory") from None
    with handle:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise CannotBuild(f"another process has held {lock} for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.1)
        yield


def main(arguments: Sequence[str]) -> None:
    """Compiles the kernels that workers on this processor use, so that the first worker does not have to; with `--all`
    also those of its other levels, for tests."""
    fastest = fastest_level()
    if fastest is None:
        print("kernels: this processor has no AVX2; torch's kernels will be used")
        return
    levels = processor_levels() if "--all" in arguments else (fastest,)
    try:
        for level in sorted(levels, key=lambda level: level != fastest):
            print(f"kernels: {library(level)}")
    except CannotBuild as error:
        print(f"kernels: {error}; torch's kernels will be used")


if __name__ == "__main__":
    main(sys.argv[1:])
