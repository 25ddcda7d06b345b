"""How the two ends of an edge find each other, through a store, before a process group is built.

Each decode worker hosts a store on one configured address. The address is enforced with a listening socket of our own:
a TCPStore that opens its own socket listens on every interface, whatever host it is given.

A group's constructor cannot be interrupted and blocks until its peer has connected. So each end first sets a key in the
store and polls for the other's, which an abort ends within one poll; the constructor then takes milliseconds. A store
that does not reply, because its process is stopped or its host has vanished, blocks its caller without limit: an abort
ends that by shutting down the connection on which the thread waits.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread, get_native_id

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from baton.core.errors import HandoffError, StartupError
from baton.transfer.edge import EdgeSpec
from baton.transfer.sockets import unblock_thread

GRACE_S = 0.5
_CALL_TIMEOUT_S = 5.0
_DIAL_S = 1.0
_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.02
_HERE = "here"
_NAMES = (f"{_HERE}/0", f"{_HERE}/1", "0/0", "0/1", "0:1")  # ours, Gloo's, NCCL's (from its source, not tested)


class EdgeStore:
    """Hosts the store. `host` is a numeric address or a name; `port` 0 binds a free port.

    Both ends of an edge delete its keys once they have connected, and an end that gives up deletes them too, so the
    number of keys is bounded by the number of edges being made. An end that is killed meanwhile leaves only its own
    key.

    Raises StartupError when the address cannot be bound.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.nonce = secrets.token_hex(8)
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.create_server(address, family=family, backlog=256) as listener:
                self.port: int = listener.getsockname()[1]
                timeout = timedelta(seconds=_CALL_TIMEOUT_S)
                # The store's C++ server takes ownership of the descriptor and closes it.
                self._store: TCPStore | None = TCPStore(
                    host, self.port, None, True, timeout, False, False, listener.fileno(), True
                )
                listener.detach()
        except (OSError, RuntimeError) as e:
            raise StartupError(f"edge store: cannot listen on {host}:{port}: {e}") from e

    def close(self) -> None:
        """Stops listening and drops every connection to the store. Existing edges do not need it."""
        self._store = None

    def __repr__(self) -> str:
        return f"<EdgeStore {self.host}:{self.port}{'' if self._store else ' closed'}>"


class Meeting:
    """The connecting of one end to its peer, once. `abort` may be called from any thread; all else belongs to the
    edge's thread."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._aborted, self._started, self._over = Event(), Event(), Event()
        self._thread = 0  # native id of the thread that runs it

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        """Does not block. A `meet` in progress ends by itself and deletes its keys; if the store blocks it for longer
        than GRACE_S, its connection is shut down and the keys remain."""
        self._aborted.set()
        if self._started.is_set() and not self._over.is_set():
            Thread(target=self._free, name="edge-abort", daemon=True).start()

    @contextmanager
    def meet(self) -> Iterator[tuple[Store, float]]:
        """Yields the edge's own store and the deadline (monotonic) for connecting the edge, once both ends are present.

        A RuntimeError of the body becomes a HandoffError. Afterwards, or on failure, the keys of this generation are
        deleted; the store's connection closes with the store object. Raises HandoffError when the store does not reply,
        the peer does not arrive within `connect_timeout_s`, or on `abort`.
        """
        spec = self.spec
        deadline = time.monotonic() + spec.connect_timeout_s
        self._thread = get_native_id()
        self._started.set()
        try:
            self._check_aborted()
            client = self._dial(deadline)
            try:
                client.set(f"{spec.prefix}/{_HERE}/{spec.rank}", "1")
                self._await_peer(client, deadline)
                client.set_timeout(_until(deadline))
                yield PrefixStore(spec.prefix, client), deadline
            except HandoffError:
                raise
            except (OSError, RuntimeError) as e:
                raise spec.error(f"connecting failed: {str(e).splitlines()[0]}") from e
            finally:
                # The store and its keys may have ended with its worker, or an abort has shut its connection down.
                with contextlib.suppress(OSError, RuntimeError):
                    client.set_timeout(timedelta(seconds=1))
                    delete_keys(client, spec.prefix)
        finally:
            self._over.set()

    def _dial(self, deadline: float) -> TCPStore:
        """Returns a client of the store. A plain socket is tried first: TCPStore's own connect retries and cannot be
        interrupted. Raises HandoffError."""
        spec = self.spec
        try:
            probe_s = min(_DIAL_S, spec.connect_timeout_s)
            socket.create_connection((spec.host, spec.port), timeout=probe_s).close()
            return TCPStore(spec.host, spec.port, None, False, _until(deadline), False)
        except (OSError, RuntimeError) as e:
            raise spec.error(f"cannot connect to the decode worker's store: {str(e).splitlines()[0]}") from e

    def _await_peer(self, client: Store, deadline: float) -> None:
        pause_s, peer = _POLL_MIN_S, f"{self.spec.prefix}/{_HERE}/{self.spec.peer_rank}"
        while not client.check([peer]):
            self._aborted.wait(pause_s)
            self._check_aborted()
            if time.monotonic() >= deadline:
                raise self.spec.error(f"the peer did not connect within {self.spec.connect_timeout_s:.1f} s")
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)

    def _check_aborted(self) -> None:
        if self.aborted:
            raise self.spec.error("aborted before it connected")

    def _free(self) -> None:
        """Runs on a thread of its own. Repeats, since the constructor of a store client redials for a while."""
        pause_s = GRACE_S
        while not self._over.wait(pause_s):
            unblock_thread(self.spec.port, self._thread)
            pause_s = _POLL_MAX_S


def delete_keys(client: Store, prefix: str) -> None:
    """Deletes the keys of an edge under `prefix`: those of its two ends and those of the group.

    By name: torch lists keys while holding the GIL (measured), so a stopped store would block this process too.
    """
    for name in _NAMES:
        client.delete_key(f"{prefix}/{name}")


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.01))
