"""The batches process: `python -m batches`. It imports neither torch nor gRPC."""

from __future__ import annotations

import asyncio
import logging
import sys

from baton.runtime.config import BatchesConfig
from baton.runtime.options import config_command, run_main
from baton.runtime.process import die_with_parent


@config_command(BatchesConfig, name="batches", help="Files and batches, for the coordinator of a cluster.")
def main(config: BatchesConfig) -> int:
    die_with_parent()
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    for noisy in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from batches.serving import run_batches

    asyncio.run(run_batches(config))
    return 0


if __name__ == "__main__":
    run_main(main, prog_name="batches")
