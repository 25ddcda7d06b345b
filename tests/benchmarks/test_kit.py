"""What benchmarks start ends with them."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import kit

DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


def test_a_process_that_ignores_an_interrupt_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            kit._stop(process, 0.1)
            assert process.returncode == -9
        finally:
            process.kill()
