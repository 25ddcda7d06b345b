"""Compiling the kernels: the level, one compilation for all processes, and one plain reason when it is impossible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine.kernels import build, native
from baton.engine.kernels.build import CannotBuild, fastest_level, library, processor_levels
from baton.engine.kernels.native import choose_kernels
from tests.support.engine_driver import tiny_runner

CPU = torch.device("cpu")
AVX512 = "avx512f avx512bw avx512dq avx512vl fma avx2"
BF16 = f"{AVX512} avx512_bf16 avx512_vnni"
needs_avx2 = pytest.mark.skipif(not processor_levels(), reason="no AVX2")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "cxx"
    path.write_text(f"#!{sys.executable}\nimport sys, time\nout = sys.argv[sys.argv.index('-o') + 1]\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("fpu avx fma", ()),
        ("fpu avx2", ()),
        ("fpu avx2 fma", ("avx2",)),
        (AVX512, ("avx2", "avx512")),
        (f"{AVX512} avx512_bf16", ("avx2", "avx512")),
        (BF16, ("avx2", "avx512", "avx512_bf16")),
        (f"{BF16} amx_tile amx_int8", ("avx2", "avx512", "avx512_bf16")),
        (f"{BF16} amx_tile amx_bf16", build.LEVELS),
    ],
)
def test_levels_follow_from_the_processor_flags(flags: str, levels: tuple[str, ...]) -> None:
    assert processor_levels(f"processor : 0\nflags\t\t: {flags}\nflags : none\n") == levels


def test_processes_that_start_together_compile_once(empty_cache: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler = fake_compiler(
        tmp_path, f"time.sleep(0.5)\nopen({str(calls)!r}, 'a').write('x')\nopen(out, 'w').write('done')"
    )
    code = "from baton.engine.kernels.build import library; print(library('avx512').read_text())"
    environment = {"CXX": compiler, "BATON_CACHE_DIR": str(empty_cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60) for process in started]
    assert [out.decode().strip() for out, _ in outputs] == ["done"] * 4
    assert calls.read_text() == "x"
    assert sum(b"compiling the kernels for avx512" in err for _, err in outputs) == 1


def test_another_level_or_other_flags_build_another_file(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "open(out, 'w').write('a')"))
    first = library("avx512")
    assert library("avx512") == first
    assert library("amx") != first
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    assert library("avx512") != first


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sys.stderr.write('gemm.cpp:3:1: error: no such type\\nmore'); sys.exit(1)", "failed: gemm.cpp:3:1: error"),
        ("sys.exit(1)", "cxx failed"),
    ],
)
def test_compiler_failure_is_reported_and_leaves_no_library(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    with pytest.raises(CannotBuild, match=expected):
        library("avx512")
    assert not list(empty_cache.glob("*.so"))


@needs_avx2
def test_missing_compiler_falls_back_to_torch_with_the_reason(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: object
) -> None:
    native.load.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose_kernels("auto", CPU) == (
        None,
        "torch (no C++ compiler (no-such-compiler is not installed; set CXX to use another))",
    )
    with pytest.raises(StartupError, match="kernels avx2: no C\\+\\+ compiler"):
        choose_kernels("avx2", CPU)
    native.load.cache_clear()


def test_cache_writable_by_other_users_is_refused(empty_cache: Path) -> None:
    empty_cache.mkdir()
    empty_cache.chmod(0o777)
    with pytest.raises(CannotBuild, match="is writable by other users"):
        library("avx512")


def test_kernel_names_are_resolved_or_refused(checkpoint: object) -> None:
    assert choose_kernels("torch", CPU) == (None, "torch")
    assert choose_kernels("auto", torch.device("cuda")) == (None, "torch")
    with pytest.raises(StartupError, match="kernels must be auto, torch, avx2, avx512, avx512_bf16, amx, not 'mkl'"):
        choose_kernels("mkl", CPU)


@needs_avx2
def test_level_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpuinfo", lambda: "")
    native.load.cache_clear()
    assert choose_kernels("auto", CPU) == (None, "torch (this processor has no AVX2)")
    with pytest.raises(StartupError, match="kernels amx: this processor has no amx"):
        choose_kernels("amx", CPU)
    native.load.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "flags", "level"),
    [
        ("GenuineIntel", f"{BF16} amx_tile amx_bf16", "amx"),
        ("GenuineIntel", BF16, "avx512"),
        ("AuthenticAMD", BF16, "avx512_bf16"),
        ("GenuineIntel", AVX512, "avx512"),
        ("AuthenticAMD", "avx2 fma", "avx2"),
        ("AuthenticAMD", "avx2", None),
    ],
)
def test_auto_selects_the_fastest_level(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, level: str | None
) -> None:
    cpuinfo = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n"
    assert fastest_level(cpuinfo) == level
    monkeypatch.setattr(build, "_cpuinfo", lambda: cpuinfo)
    asked: list[str] = []

    class Loaded:
        def __init__(self, level: str) -> None:
            asked.append(level)
            self.level = self.name = level

    monkeypatch.setattr(native, "load", Loaded)
    assert choose_kernels("auto", CPU)[1] == (level or "torch (this processor has no AVX2)")
    assert asked == [level] * (level is not None)


def test_runner_reports_its_kernels(checkpoint: object) -> None:
    assert tiny_runner(checkpoint("llama"), kernels="torch").kernels == "torch"  # type: ignore[operator]
