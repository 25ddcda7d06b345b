"""`baton up` whose workers may share one GPU over NCCL; otherwise as the launcher does it."""

from __future__ import annotations

from baton.runtime.options import config_command, run_main
from launch.members import Programs
from launch.up import up
from launch.up_config import UpConfig


@config_command(UpConfig, name="up", help="A cluster on one GPU.")
def command(config: UpConfig) -> int:
    return up(config, Programs(worker=("-m", "tests.support.one_gpu_worker")))


if __name__ == "__main__":
    run_main(command)
