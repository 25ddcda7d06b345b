"""The directory in which the ranks below an agent leave their errors, and what killed agents left of theirs.

An agent holds a lock on its directory for as long as it lives; the kernel drops it however the agent ends, and no pid
is compared, so containers that share a directory for temporary files are safe from each other. The next agent of the
same user removes what nobody holds.

Such a lock may be known to one kernel only where hosts share a file system (NFS with local_lock, Lustre with
localflock). So names carry the kernel's boot id, and an agent looks only at those of its own kernel. What was left
behind before the host was started again therefore stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "baton-ranks-held-"  # then the kernel, then what makes it unique
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_YOUNG_S = 60.0  # an agent may have made its directory and not locked it yet


def make_rank_directory() -> str:
    """A fresh one, held until this process ends. Raises OSError when there is no place for it."""
    try:
        prefix = held_prefix()
    except OSError:  # a kernel without a name: what is made here is never taken for left behind
        return tempfile.mkdtemp(prefix="baton-ranks-")
    made = tempfile.mkdtemp(prefix=prefix)
    with contextlib.suppress(OSError):  # a file system without locks: there nothing can be taken for left behind
        fcntl.flock(os.open(made, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    remove_left_behind(Path(made).parent)
    return made


def held_prefix() -> str:
    """What the names of all directories begin with whose locks this kernel knows: equal in its containers, another one
    on other hosts and after a restart. Raises OSError when the kernel does not tell."""
    return f"{PREFIX}{_BOOT_ID.read_text().strip().replace('-', '')[:12]}-"


def remove_left_behind(where: Path) -> None:
    """Removes this user's directories of agents of this kernel that are gone. What cannot be removed stays.

    Raises:
        OSError: the kernel does not tell its boot id.
    """
    for path in where.glob(held_prefix() + "*"):
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
