"""The launchers of a worker's ranks as processes that run a program written by a test; the box of a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.failure import _BOTTOM, _TOP

ROOT = Path(__file__).parents[2]


class Launcher:
    """A real launcher, launch.agent or launch.torchrun, that runs a program written by the test."""

    def __init__(
        self,
        where: Path,
        code: str,
        ranks: int,
        flags: tuple[str, ...] = (),
        module: str = "launch.agent",
        **variables: str,
    ) -> None:
        program = where / "program"  # beside the working directory, where a test may put files that nothing may import
        program.mkdir(exist_ok=True)
        (program / "the_rank.py").write_text(f"import os, sys, time, signal\nimport baton.runtime.process as p\n{code}")
        self.where, self.log = where, where / f"log-{len(list(where.glob('log-*')))}"
        (where / "tmp").mkdir(exist_ok=True)
        words = ["-m", module, "--nproc-per-node", str(ranks), *flags, "-m", "the_rank", "--worker-id", "w-0"]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{program}", "TMPDIR": str(where / "tmp"), **variables}
        with self.log.open("wb") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment, "cwd": where}
            before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup is inherited
            self.process = subprocess.Popen([sys.executable, "-P", *words], **options)
            signal.signal(signal.SIGHUP, before)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.02)

    def ends(self) -> int:
        code = self.process.wait(60)
        assert not list((self.where / "tmp").iterdir()), "it left something behind"
        return code

    @property
    def box(self) -> str:
        return " ".join(" ".join(find_box(self.output.splitlines())).replace("│", " ").split())


def find_box(lines: Sequence[str]) -> list[str]:
    """Returns the last complete box in a log; empty if there is none."""
    ends = [index for index, line in enumerate(lines) if line.startswith(_BOTTOM)]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TOP) and ends and index < ends[-1]]
    return list(lines[starts[-1] : ends[-1] + 1]) if starts else []
