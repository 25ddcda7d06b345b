"""What `/proc` says of a process."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path


def gone(pid: int) -> bool:
    """Whether it has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pids: Iterable[int], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if not gone(pid)]:
        assert time.monotonic() < deadline, f"processes {left} still run"
        time.sleep(0.02)


def listening(pid: int) -> list[str]:
    """The addresses that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                raw = bytes.fromhex(words[1].partition(":")[0])
                found.append(socket.inet_ntoa(raw[::-1]) if len(raw) == 4 else f"ipv6 {raw.hex()}")
    return found
