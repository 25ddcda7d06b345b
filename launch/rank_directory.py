"""The directory in which the ranks below an agent leave their errors, and what killed agents left of theirs.

An agent holds a lock on its directory for as long as it lives; the kernel drops it however the agent ends, and no pid
is compared, so containers that share a directory for temporary files are safe from each other. The next agent of the
same user removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "baton-ranks-held-"
_YOUNG_S = 60.0  # an agent may have made its directory and not locked it yet


def make_rank_directory() -> str:
    """A fresh one, held until this process ends. Raises OSError when there is no place for it."""
    made = tempfile.mkdtemp(prefix=PREFIX)
    with contextlib.suppress(OSError):  # a file system without locks: there nothing can be taken for left behind
        fcntl.flock(os.open(made, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    remove_left_behind(Path(made).parent)
    return made


def remove_left_behind(where: Path) -> None:
    """Removes this user's directories of agents that are gone. What cannot be removed stays."""
    for path in where.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _remove_unless_held(path, directory)
            finally:
                os.close(directory)


def _remove_unless_held(path: Path, directory: int) -> None:
    """Raises OSError when somebody holds it."""
    found = os.fstat(directory)
    old = time.time() - found.st_mtime > _YOUNG_S
    if old and found.st_uid == os.geteuid():
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
