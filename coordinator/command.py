"""The command line of the coordinator process."""

from __future__ import annotations

import asyncio
import logging
import sys

from baton.runtime.config import CoordinatorConfig
from baton.runtime.options import config_command, run_main
from baton.runtime.process import SWITCH_INTERVAL_S, die_with_parent, lasting_imports


@config_command(CoordinatorConfig, name="coordinator", help="The coordinator of a Baton cluster.")
def main(config: CoordinatorConfig) -> int:
    die_with_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    with lasting_imports():
        from coordinator.serving import run_coordinator
    asyncio.run(run_coordinator(config))
    return 0


def run() -> None:
    run_main(main, prog_name="coordinator")
