"""What an agent becomes by its imports: something that can be forked, or not, and then it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.members import PRELOAD

ROOT = Path(__file__).parents[2]

LOOK = """
import os, sys
from launch.preload import Preloaded, PreloadRefused
try:
    made = Preloaded(sys.argv[1:])
except PreloadRefused as refused:
    print("refused:", refused)
else:
    torch = sys.modules.get("torch")
    print(len(os.listdir("/proc/self/task")), "threads, CUDA", bool(torch and torch.cuda.is_initialized()))
    now = {int(f) for f in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{f}")}
    print("grown" if now - {0, 1, 2, *made.open_before} else "no file opened")
    print("stale:", made.stale())
"""


def look(*names: str, where: Path | None = None, code: str = LOOK, **environment: str) -> str:
    """What a process says that has imported them."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(where or "")]))
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    command = [sys.executable, "-P", "-c", code, *names]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": path, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("role", sorted(PRELOAD))
@pytest.mark.parametrize("threads", ["", "1", "16"])
def test_what_a_tier_imports_starts_no_thread_and_no_cuda(role: str, threads: str) -> None:
    """numpy's BLAS would start one thread for each core but the first, if it were let."""
    said = look(*PRELOAD[role], **({"OMP_NUM_THREADS": threads} if threads else {}))
    assert said == "1 threads, CUDA False\nno file opened\nstale: \n"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import threading as t; t.Thread(target=t.Event().wait, args=(60,), daemon=True).start()", "2 threads run"),
        ("import torch; torch.cuda._initialized = True", "initialised CUDA"),
    ],
)
def test_what_cannot_be_forked_is_refused(module: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text(module)
    said = look("imported", where=tmp_path)
    assert said.startswith("refused: ") and why in said


def test_a_file_that_an_import_opens_is_not_the_agents_own(tmp_path: Path) -> None:
    """A rank closes what is its agent's own. A module that keeps a file must find it open in the rank, too."""
    (tmp_path / "imported.py").write_text("import os; KEPT = os.open(os.devnull, os.O_RDONLY)")
    code = "import os; from launch.preload import Preloaded; own = os.open(os.devnull, os.O_RDONLY)\n"
    code += "mine = Preloaded(['imported']).open_before; from imported import KEPT; print(own in mine, KEPT in mine)"
    assert look(where=tmp_path, code=code) == "True False\n"


def test_the_environment_is_what_it_was() -> None:
    code = "import os, sys; from launch.preload import Preloaded; Preloaded(['json'])\n"
    code += "print('numpy' in sys.modules, os.environ.get('OPENBLAS_NUM_THREADS'))"
    assert look(code=code) == "True None\n" and look(code=code, OPENBLAS_NUM_THREADS="4") == "True 4\n"


def test_a_file_that_changed_makes_it_stale(tmp_path: Path) -> None:
    (package := tmp_path / "ours").mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("x = 1")
    code = "import os; from launch.preload import Preloaded; made = Preloaded(['ours.part']); print(made.stale())\n"
    code += "{}; print(os.path.basename(made.stale()))"
    part = str(package / "part.py")
    for change in (f"os.utime({part!r}, (1, 1))", f"os.unlink({part!r})"):
        assert look(where=tmp_path, code=code.format(change)) == "\npart.py\n"
        (package / "part.py").write_text("x = 1")
