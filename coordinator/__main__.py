"""The coordinator process: `python -m coordinator`. It never imports torch and starts in about a second."""

from __future__ import annotations

import asyncio
import logging
import sys

from baton.core.config import CoordinatorConfig
from baton.options import config_command, run_main
from baton.process import SWITCH_INTERVAL_S, die_with_parent, lasting_imports
from coordinator.garbage import keep_freed_memory


@config_command(CoordinatorConfig, name="coordinator", help="The front of a Baton cluster.")
def main(config: CoordinatorConfig) -> int:
    die_with_parent()
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    with lasting_imports():
        from coordinator.serving import run_coordinator
    asyncio.run(run_coordinator(config))
    return 0


if __name__ == "__main__":
    run_main(main, prog_name="coordinator")
