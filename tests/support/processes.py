"""State of a process, read from `/proc`."""

from __future__ import annotations

import contextlib
import ipaddress
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LISTENS = "0A"


def has_exited(pid: int) -> bool:
    """Returns whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_exited(pids: Iterable[int], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if not has_exited(pid)]:
        assert time.monotonic() < deadline, f"processes {left} still run"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Socket:
    """A TCP socket as listed by the kernel, including those of gRPC and Gloo, which no audit hook can observe."""

    pid: int
    address: str
    port: int
    remote_port: int
    state: str


def sockets(pids: list[int]) -> list[Socket]:
    """Returns the TCP sockets of these processes."""
    owner = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (target := str(entry.readlink())).startswith("socket:["):
                        owner[target[8:-1]] = pid
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [Socket(owner[row[9]], *_place(row[1]), _place(row[2])[1], row[3]) for row in rows if row[9] in owner]


def _place(text: str) -> tuple[str, int]:
    raw, _, port = text.partition(":")
    # 32-bit words, each in the machine's byte order.
    packed = b"".join(struct.pack("=I", int(raw[i : i + 8], 16)) for i in range(0, len(raw), 8))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)


def listening(pid: int) -> set[tuple[str, int]]:
    """Returns the addresses and ports on which a process listens."""
    return {(s.address, s.port) for s in sockets([pid]) if s.state == LISTENS}
