"""Nodes of a cluster on one machine: network namespaces, each connected by one cable to a switch of their own.

    with nodes("coordinator", "prefill", "decode") as network:
        process = network["prefill"].start([sys.executable, "-m", "prefill", "--host", network["prefill"].address])
        network["prefill"].cut("far")
        network["prefill"].mend("far")

They do not affect the machine's own network. Their names are unique to this process; in all cases the processes in the
namespaces are killed and the namespaces deleted. Needs root and iproute2: `missing()` returns what is unavailable.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.forks import ForkedProcess, enter_network

SWITCH = "switch"
_numbers = itertools.count(1)


def missing() -> str:
    """Returns why namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"bt{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
            _ip("-n", name, "link", "add", "switch0", "type", "bridge")
            _ip("netns", "exec", name, "ss", "-Hltn")
        finally:
            _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as e:
        return f"network namespaces are not allowed here: {getattr(e, 'stderr', '') or e}"
    return ""


class Node:
    """A namespace, its address, and the cable `eth0`, whose other end is connected to the switch."""

    def __init__(self, prefix: str, name: str, number: int, network: str) -> None:
        self.name, self.namespace, self.address = name, f"{prefix}{number}", f"{network}.{number}"
        self._switch, self._port = f"{prefix}0", f"port{number}"

    def start(self, command: Sequence[str], *, forked: bool = False, **options: Any) -> subprocess.Popen[bytes]:
        """Starts a process as Popen does, as a fork (tests/support/forks.py) or with exec."""
        if forked:
            return ForkedProcess(command, namespace=self.namespace, **options)
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], **options)

    def cut(self, end: str) -> None:
        """`near`: the node's own interface goes down. `far`: the node detects nothing, and what it sends is lost."""
        self._set(end, "down")

    def mend(self, end: str) -> None:
        self._set(end, "up")

    def listeners(self) -> list[tuple[str, str]]:
        """Returns address and process of every TCP listener."""
        lines = _ip("netns", "exec", self.namespace, "ss", "-Hltnp").splitlines()
        words = [line.split() for line in lines]
        addresses = [w[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:") for w in words]
        return [(address, " ".join(w[5:])) for address, w in zip(addresses, words, strict=True)]

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Returns threads of this process whose sockets are in the node."""
        return ThreadPoolExecutor(count, initializer=enter_network, initargs=(self.namespace,))

    def _set(self, end: str, state: str) -> None:
        where, link = {"near": (self.namespace, "eth0"), "far": (self._switch, self._port)}[end]
        _ip("-n", where, "link", "set", link, state)

    def _plug(self) -> None:
        _ip("netns", "add", self.namespace)
        _ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.namespace)
        _ip("-n", self._switch, "link", "set", self._port, "master", SWITCH, "up")
        _ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", self.namespace, "link", "set", link, "up")


@contextlib.contextmanager
def nodes(*names: str, network: str = "10.77.0") -> Iterator[dict[str, Node]]:
    prefix = f"bt{os.getpid()}n{next(_numbers)}x"
    made = {name: Node(prefix, name, number, network) for number, name in enumerate(names, 1)}
    namespaces = [f"{prefix}{number}" for number in range(len(names) + 1)]
    try:
        _ip("netns", "add", namespaces[0])
        _ip("-n", namespaces[0], "link", "add", SWITCH, "type", "bridge")
        _ip("-n", namespaces[0], "link", "set", SWITCH, "up")
        for node in made.values():
            node._plug()
        yield made
    finally:
        for namespace in filter(_exists, namespaces):
            _kill_all(lambda namespace=namespace: _ip("netns", "pids", namespace).split())  # type: ignore[misc]
            _ip("netns", "del", namespace)


def _exists(namespace: str) -> bool:
    return Path(f"/run/netns/{namespace}").exists()


def _kill_all(pids: Callable[[], list[str]], limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while (left := pids()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=20).stdout
