"""Runs a process of a cluster as code of another protocol version: `python -m tests.support.versioned MODULE FLAGS`.

The file $BATON_TEST_PROTOCOL holds the version. `up` is `baton up` itself, whose processes are run this way.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

VARIABLE = "BATON_TEST_PROTOCOL"


def up() -> None:
    from baton.runtime.options import config_command, run_main
    from launch.members import Programs
    from launch.supervisor import Backoff
    from launch.up import up
    from launch.up_config import UpConfig

    run = (sys.executable, "-m", __spec__.name)

    @config_command(UpConfig, name="up", help="A cluster whose processes may be of any protocol version.")
    def command(config: UpConfig) -> int:
        programs = Programs(coordinator=(*run, "coordinator"), agent=(), worker=run)
        return up(config, programs, Backoff(first_s=0.1, longest_s=0.1))

    run_main(command)


def main(module: str) -> None:
    importlib.import_module("baton.core.compatibility")
    version = int(Path(os.environ[VARIABLE]).read_text())
    own = {"PROTOCOL_VERSION": version, "SERVED_VERSIONS": range(version - 1, version + 2)}
    for name, imported in [*sys.modules.items()]:  # in a fork, others have the usual versions from there
        if name.startswith(("baton.", "coordinator.")):
            vars(imported).update({key: value for key, value in own.items() if key in vars(imported)})
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    up() if sys.argv[0] == "up" else main(sys.argv[0])
