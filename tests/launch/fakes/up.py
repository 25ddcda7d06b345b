"""`baton up` with fake processes; FAKE_AGENT=1 puts the workers under the real agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from baton.runtime.options import config_command, run_main
from launch.members import Programs
from launch.supervisor import Backoff
from launch.up import up
from launch.up_config import UpConfig

HERE = Path(__file__).parent


@config_command(UpConfig, name="up", help="A fake cluster.")
def command(config: UpConfig) -> int:
    worker: tuple[str, ...] = (sys.executable, str(HERE / "worker.py"))
    agent: tuple[str, ...] = ()
    if os.environ.get("FAKE_AGENT"):
        agent, worker = Programs().agent, ("-m", "tests.launch.fakes.worker")
    coordinator = (sys.executable, str(HERE / "front.py"))
    programs = Programs(coordinator, agent, worker, batches=(sys.executable, str(HERE / "batches.py")))
    return up(config, programs, Backoff(first_s=float(os.environ.get("FAKE_BACKOFF_S", "0.2")), tries_before_joining=2))


if __name__ == "__main__":
    run_main(command)
