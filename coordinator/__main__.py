"""The coordinator process: `python -m coordinator`. It never imports torch and starts in about a second."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from baton.runtime.config import CoordinatorConfig
from baton.runtime.options import config_command, run_main
from baton.runtime.process import SWITCH_INTERVAL_S, die_with_parent, lasting_imports

HUGE_PAGES = "glibc.malloc.hugetlb=1"
_TUNABLES = "GLIBC_TUNABLES"


def use_huge_pages() -> None:
    """Re-executes this program in its process, with large blocks of memory in huge pages: glibc reads the setting only
    at process start. Other C libraries and glibc before 2.35 ignore it (decision 0020)."""
    given = os.environ.get(_TUNABLES, "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in given:
        os.environ[_TUNABLES] = f"{given}:{HUGE_PAGES}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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


if __name__ == "__main__":
    use_huge_pages()
    run_main(main, prog_name="coordinator")
