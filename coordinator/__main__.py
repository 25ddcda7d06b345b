"""The coordinator process: `python -m coordinator`. It never imports torch and starts in about a second.

Little is imported here: the program starts twice, and its child processes import this file, too.
"""

from __future__ import annotations

import os
import sys

HUGE_PAGES = "glibc.malloc.hugetlb=1"
_TUNABLES = "GLIBC_TUNABLES"


def use_huge_pages() -> None:
    """Re-executes this program in its process, with large blocks of memory in huge pages: glibc reads the setting only
    at process start. Other C libraries and glibc before 2.35 ignore it (decision 0020)."""
    given = os.environ.get(_TUNABLES, "")
    if sys.platform == "linux" and "glibc.malloc.hugetlb" not in given:
        os.environ[_TUNABLES] = f"{given}:{HUGE_PAGES}".lstrip(":")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    use_huge_pages()
    from coordinator.command import run

    run()
