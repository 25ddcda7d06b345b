"""Limits open connections: HTTP and gRPC share one budget, the files that the process may open."""

from __future__ import annotations

import os
import resource
from collections import Counter

from baton.runtime.process import allow_open_files

MAX_CONNECTIONS = 16_384
ONE_ADDRESS = 0.75  # share of the limit for one address, over HTTP
GRPC = 0.25  # share of the limit for gRPC: each connection carries 256 calls at a time
RESERVED_FILES = 128  # for everything else: sessions of workers, logs
FEW = 1_024  # a limit below it is named at the start: a client may hold hundreds of streams


class ConnectionLimit:
    """Limits open connections to the files that the process may open and that nothing else (including gRPC connections)
    has open, at most MAX_CONNECTIONS; one address, unless it is loopback, at most three quarters of that.

    State: the numbers of open connections per address and in total, the limit, and whether each connection is to close
    after its next response."""

    def __init__(self) -> None:
        self.closing = False
        self._of: Counter[str] = Counter()
        self._total, self.limit = 0, connection_limit(0)

    def opened(self, address: str) -> bool:
        """Counts a connection; returns whether it may stay open."""
        self._of[address] += 1
        self._total += 1
        share = self.limit if _is_loopback(address) else max(1, int(self.limit * ONE_ADDRESS))
        return self._total <= self.limit and self._of[address] <= share

    def closed(self, address: str) -> None:
        self._total -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def count_files(self) -> None:
        """Recomputes the limit. Without a count by the kernel, 16,000 open files take 50 ms: not for the event loop."""
        self.limit = connection_limit(max(0, _open_files() - self._total))


def allow_connections() -> None:
    """Allows as many open files as MAX_CONNECTIONS needs, if permitted. At the limit every accept fails, which asyncio
    logs thousands of times a second."""
    allow_open_files(MAX_CONNECTIONS + RESERVED_FILES)


def connection_limit(other_files: int) -> int:
    """Returns how many connections may be open, beside RESERVED_FILES and the `other_files` that are open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _allowed(soft, other_files)


def few_connections() -> str:
    """Returns one line about a hard limit of open files, which `allow_connections` cannot exceed, if it allows few
    connections; else an empty string."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (limit := _allowed(hard, 0)) >= FEW:
        return ""
    enough = MAX_CONNECTIONS + RESERVED_FILES
    return f"at most {limit} connections of clients: ulimit -Hn is {hard}; {enough} allow {MAX_CONNECTIONS}"


def _allowed(files: int, other_files: int) -> int:
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - RESERVED_FILES - other_files))


def _is_loopback(address: str) -> bool:
    """Returns whether it is a loopback address: a proxy on this host carries the connections of all clients."""
    return address.startswith("127.") or address in ("::1", "")


def _open_files() -> int:
    try:
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # the size counts them, Linux 6.2+
    except OSError:  # not Linux
        return 0
