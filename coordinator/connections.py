"""How many connections may be open: HTTP and gRPC have one budget, the files that the process may open."""

from __future__ import annotations

import os
import resource
from collections import Counter

from baton.process import allow_open_files

MAX_CONNECTIONS = 16_384
ONE_ADDRESS = 0.75  # of them, over HTTP
GRPC = 0.25  # of them at most: each of gRPC's carries 256 calls at a time
RESERVED_FILES = 128  # what the process may open next: sessions of workers, logs


class ConnectionLimit:
    """How many connections may be open: as many files as the process may have and nothing else has open (connections of
    gRPC have), MAX_CONNECTIONS at most, and for one address, unless it is loopback, three quarters of that.

    Its state: the open connections of each address, of all, and the limit."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self._total, self.limit = 0, connection_limit(0)

    def opened(self, address: str) -> bool:
        """Counts a connection; whether it may stay."""
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
        """Sets the limit anew. Where the kernel has no count, 16,000 open files take 50 ms: not for the event loop."""
        self.limit = connection_limit(max(0, _open_files() - self._total))


def allow_connections() -> None:
    """As many open files as MAX_CONNECTIONS needs, where that may be. At the limit every accept fails, which asyncio
    logs thousands of times a second."""
    allow_open_files(MAX_CONNECTIONS + RESERVED_FILES)


def connection_limit(other_files: int) -> int:
    """How many connections leave files to open for everything else, of which `other_files` are open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - RESERVED_FILES - other_files))


def _is_loopback(address: str) -> bool:
    """A proxy on this host has the connections of all clients."""
    return address.startswith("127.") or address in ("::1", "")


def _open_files() -> int:
    try:
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # the size is theirs from Linux 6.2
    except OSError:  # not Linux
        return 0
