"""`baton up` whose workers compute with random weights of the shape in config.json, without a checkpoint on disk:
`python -m benchmarks.gpu_random_up --model DIR ...`."""

from __future__ import annotations

from baton.runtime.options import config_command, run_main
from launch.members import Programs
from launch.up import up
from launch.up_config import UpConfig


@config_command(UpConfig, name="up", help="A cluster with random weights.")
def command(config: UpConfig) -> int:
    return up(config, Programs(worker=("-m", "benchmarks.gpu_random_worker")))


if __name__ == "__main__":
    run_main(command)
