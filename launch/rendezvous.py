"""Where the agents of a job over several nodes meet: one store at one named address, kept by the agent of node 0.

torch waits in native code, where no signal's handler runs: up to ten minutes in which SIGTERM and Ctrl-C do nothing and
nothing is said. So what may take long is waited for here, in short naps: node 0 until it answers, then all others, then
that each has seen all: one that left while it waited is not taken for present. Whoever loses node 0 meanwhile begins
again with the same limit; so does who comes back to a job that has begun, once node 0 has ended it
(`launch.node_watch`).
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from launch.bounded_store import BoundedStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

MEET_TIMEOUT_S = 600.0  # for all nodes of a job to meet, and for each answer of the store afterwards
TRY_S = 2.0  # one attempt to connect
STORE_TRY_S = 10.0  # one attempt to speak to the store behind an address that accepts; torch takes no signal here
SILENCE_S = 30.0  # after which a store that was there counts as gone, and an agent as having left
STILL_S = 5.0  # an agent that has said nothing new for so long is not there: it says something each second
PAUSE_S = 0.2
_ANSWER_S = 3.0  # within which a node that has come is expected to have seen the last one; nothing is said before


class Marks(Protocol):
    """What of a store nodes need to see each other. Both raise RuntimeError when the store is gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...


def await_address(host: str, port: int, deadline: float, say: Callable[[str], None]) -> None:
    """Returns once somebody accepts connections there; says once what it waits for. `deadline` is of time.monotonic().

    Raises:
        OSError: nobody did until the deadline.
    """
    told = False
    while (reason := _refusal(host, port)) is not None:
        where = f"node 0 of this job at {host} port {port} (MASTER_ADDR, MASTER_PORT)"
        if time.monotonic() >= deadline:
            raise OSError(f"waited in vain for {where}: {reason}")
        if not told:
            told = True
            say(f"waiting up to {deadline - time.monotonic():.0f} s for {where}: {reason}")
        time.sleep(PAUSE_S)


def await_nodes(store: Marks, rank: int, nodes: int, deadline: float, say: Callable[[str], None]) -> None:
    """Returns once the agents of all nodes have come to the store, this one, `rank`, included, and each has seen that
    all have: a node that came and left again sees nothing. Says for whom it waits, again when they are fewer.

    Raises:
        OSError: one did not come until the deadline, or left.
        RuntimeError: the store is gone.
    """
    store.set(mark("node", rank), "here")
    _await_marks(store, "node", nodes, "", 0.0, deadline, say)
    store.set(mark("ready", rank), "here")
    left = ", which came and then left or stood still: start it again if it ended"
    _await_marks(store, "ready", nodes, left, _ANSWER_S, deadline, say)


def open_store(host: str, port: int, rank: int, nodes: int) -> tuple[TCPStore, int]:
    """The job's store, once all nodes have met there, and its port: the kernel picks one for 0.

    Raises:
        OSError: the address cannot be had, or not all came in time.
    """
    deadline = time.monotonic() + MEET_TIMEOUT_S
    if rank == 0:
        store, port = _keep(host, port, nodes)
        await_nodes(store, rank, nodes, deadline, say)
        return store, port
    while True:
        await_address(host, port, deadline, say)
        with contextlib.suppress(RuntimeError):  # torch's own: node 0 ended meanwhile, or speaks otherwise
            store = _join(host, port, nodes)
            bounded = BoundedStore(store, SILENCE_S)
            if bounded.check([mark("begun", rank)]):
                _await_end(bounded, rank, deadline, say)
            await_nodes(bounded, rank, nodes, deadline, say)
            bounded.set(mark("begun", rank), "here")
            return store, port
        if time.monotonic() >= deadline:
            raise OSError(f"what answers at {host} port {port} is not node 0 of this job, or went away")
        time.sleep(PAUSE_S)


def watch_store(host: str, port: int, nodes: int) -> BoundedStore:
    """A second connection to the job's store: one thread that waits in the other would hold up all.

    Raises:
        RuntimeError: nobody keeps a store there, or it does not answer.
    """
    return BoundedStore(_join(host, port, nodes), SILENCE_S)


def register(on_met: Callable[[str, int, int, int], None]) -> None:
    """Makes `--rdzv-backend baton` known to torchrun. `on_met` hears when all nodes have met: the host and port of the
    store, this node's number and how many there are."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class NamedAddressRendezvous(RendezvousHandler):
        """One store at one named address, kept by node 0; a job has one round, its workers reuse the agent's store."""

        def __init__(self, host: str, port: int, rank: int, nodes: int, run_id: str) -> None:
            self._address, self._rank, self._nodes, self._run_id = (host, port), rank, nodes, run_id
            self._store: TCPStore | None = None

        def get_backend(self) -> str:
            return "baton"

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                host, port = self._address
                self._store, port = open_store(host, port, self._rank, self._nodes)
                self._address = (host, port)
                on_met(host, port, self._rank, self._nodes)
            return RendezvousInfo(
                PrefixStore(self._run_id, self._store), self._rank, self._nodes, RendezvousStoreInfo(*self._address)
            )

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        host, _, port = parameters.endpoint.strip().rpartition(":")
        rank = int(parameters.config.get("rank", 0))
        if parameters.max_nodes > 1 and not int(port):
            raise OSError("a job over several nodes needs --master-addr and --master-port of node 0")
        return NamedAddressRendezvous(host.strip("[]"), int(port), rank, parameters.max_nodes, parameters.run_id)

    rendezvous_handler_registry.register("baton", create)


def _await_marks(
    store: Marks, kind: str, nodes: int, why: str, quiet_s: float, deadline: float, say: Callable[[str], None]
) -> None:
    """Until every node has set this mark; says whose are missing, and `why`, after `quiet_s`."""
    told: list[int] = []
    missing = list(range(nodes))
    loud = time.monotonic() + quiet_s
    while missing := [node for node in missing if not store.check([mark(kind, node)])]:
        whom = f"NODE_RANK {', '.join(map(str, missing))} of this job of {nodes} nodes{why}"
        if time.monotonic() >= deadline:
            raise OSError(f"waited in vain for {whom}")
        if missing != told and time.monotonic() >= loud:
            told = missing
            say(f"waiting up to {deadline - time.monotonic():.0f} s for {whom}")
        time.sleep(PAUSE_S)


def _keep(host: str, port: int, nodes: int) -> tuple[TCPStore, int]:
    """Bound to the address only: the socket is ours."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=MEET_TIMEOUT_S)
    descriptor = listener.detach()
    return TCPStore(host, port, nodes, True, timeout, False, master_listen_fd=descriptor, use_libuv=True), port


def _join(host: str, port: int, nodes: int) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(host, port, nodes, False, timedelta(seconds=STORE_TRY_S))
    store.set_timeout(timedelta(seconds=MEET_TIMEOUT_S))
    return store


def _await_end(store: BoundedStore, rank: int, deadline: float, say: Callable[[str], None]) -> None:
    """Tells a job that began with this node that its ranks here have ended, and waits until it is over: then the store
    ends, which raises RuntimeError. Raises OSError when it does not until the deadline, or this node's agent of then
    still lives."""
    alive, until = store.read(mark("alive", rank)), time.monotonic() + STILL_S
    while time.monotonic() < until:
        time.sleep(PAUSE_S)
        if store.read(mark("alive", rank)) != alive:
            raise OSError(f"NODE_RANK {rank} of this job runs already: end its agent first, or give this one another")
    store.set(mark("left", rank), "here")
    what = "node 0 of this job to end what it began before this node came again"
    say(f"waiting up to {deadline - time.monotonic():.0f} s for {what}")
    while time.monotonic() < deadline:
        store.check([mark("left", rank)])
        time.sleep(PAUSE_S)
    raise OSError(f"waited in vain for {what}")


def _refusal(host: str, port: int) -> str | None:
    """Why nobody can be reached there; None where somebody can."""
    try:
        with socket.create_connection((host, port), timeout=TRY_S) as connection:
            # A port without a listener that the kernel also hands out can be connected to itself.
            return "nobody listens" if connection.getsockname() == connection.getpeername() else None
    except OSError as error:
        return error.strerror or str(error)


def mark(kind: str, node: int) -> str:
    """The key of what one node has said: it is there, sees all others, has begun, lives, or has left."""
    return f"baton/{kind}-{node}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
