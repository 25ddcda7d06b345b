"""`baton up` with fake processes; FAKE_AGENT=1 puts the workers under the real agent."""

from __future__ import annotations

import os
import sys

from baton.runtime.options import config_command, run_main
from launch.members import Programs
from launch.supervisor import Backoff
from launch.up import up
from launch.up_config import UpConfig


def fake(name: str) -> tuple[str, ...]:
    return "-m", f"tests.launch.fakes.{name}"


@config_command(UpConfig, name="up", help="A fake cluster.")
def command(config: UpConfig) -> int:
    run = (sys.executable,)
    agent, worker = (Programs().agent, fake("worker")) if os.environ.get("FAKE_AGENT") else ((), run + fake("worker"))
    programs = Programs(run + fake("front"), agent, worker, batches=run + fake("batches"))
    return up(config, programs, Backoff(first_s=float(os.environ.get("FAKE_BACKOFF_S", "0.2")), tries_before_joining=2))


if __name__ == "__main__":
    run_main(command)
