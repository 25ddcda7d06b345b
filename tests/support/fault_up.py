"""`baton up` with `fault_worker`s as workers, restarted quickly; otherwise as the launcher does it."""

from __future__ import annotations

import sys

from baton.runtime.options import config_command, run_main
from launch.members import Programs
from launch.supervisor import Backoff
from launch.up import up
from launch.up_config import UpConfig

WORKER = "tests.support.fault_worker"


@config_command(UpConfig, name="up", help="A cluster in which a test can make things go wrong.")
def command(config: UpConfig) -> int:
    programs = Programs(worker=("-m", WORKER))
    if config.prefill_tp == config.decode_tp == 1:  # these need no agent, and start twice as fast without one
        programs = Programs(agent=(), worker=(sys.executable, "-m", WORKER))
    return up(config, programs, Backoff(first_s=0.1, longest_s=0.1))


if __name__ == "__main__":
    run_main(command)
