"""Where and how the two ends of an edge meet before a process group is built.

Each decode worker keeps a store on one named address. The address is enforced with a listening socket of our own: a
TCPStore that opens its own socket listens on every interface, whatever host it is given.

A group's constructor blocks until its peer has come and cannot be stopped from outside. So each end first leaves a
key in the store and polls for the other's, which an abort ends within one poll; the constructor then takes
milliseconds. A store that says nothing, since its process is stopped or its host has vanished, holds its caller for
ever: an abort ends that by shutting down the connection that its thread waits for.
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
from baton.transfer.sockets import free_from

GRACE_S = 0.5
_CALL_TIMEOUT_S = 5.0
_DIAL_S = 1.0
_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.02
_HERE = "here"
_NAMES = (f"{_HERE}/0", f"{_HERE}/1", "0/0", "0/1", "0:1")  # ours, Gloo's, NCCL's (read in its source, not run)


class EdgeStore:
    """Hosts the store. `host` is a numeric address or a name; `port` 0 takes a free one.

    Both ends of an edge delete its keys once they have met, and the end that gives up deletes them too, so the number
    of keys is bounded by the number of edges being made. An end that is killed meanwhile leaves its key: one, once.

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
                # The store's C++ server takes the descriptor over and closes it.
                self._store: TCPStore | None = TCPStore(
                    host, self.port, None, True, timeout, False, False, listener.fileno(), True
                )
                listener.detach()
        except (OSError, RuntimeError) as e:
            raise StartupError(f"edge store: cannot listen on {host}:{port}: {e}") from e

    def close(self) -> None:
        """Stops listening and drops every connection to the store. Edges already made do not need it."""
        self._store = None

    def __repr__(self) -> str:
        return f"<EdgeStore {self.host}:{self.port}{'' if self._store else ' closed'}>"


class Meeting:
    """One end's meeting with its peer, once. Complete state: whether it was aborted, has begun, is over, and the thread
    that it is on. `abort` may come from any thread; the rest is the edge's thread's."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._aborted, self._begun, self._over = Event(), Event(), Event()
        self._thread = 0

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        """Does not block. What is under way ends by itself and deletes its keys, or, where the store holds it for
        longer than GRACE_S, without them."""
        self._aborted.set()
        if self._begun.is_set() and not self._over.is_set():
            Thread(target=self._free, name="edge-abort", daemon=True).start()

    @contextmanager
    def meet(self) -> Iterator[tuple[Store, float]]:
        """Yields the edge's own store and the instant (monotonic) by which the edge must stand, once both ends are
        there.

        What the body raises as RuntimeError becomes a HandoffError. Afterwards, or on failure, the keys of this
        generation are deleted; the store's connection closes with the store object. Raises HandoffError when the store
        does not answer, the peer does not come within `connect_timeout_s`, or on `abort`.
        """
        spec = self.spec
        deadline = time.monotonic() + spec.connect_timeout_s
        self._thread = get_native_id()
        self._begun.set()
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
                # The store may have gone away with its worker, and its keys with it; or an abort could not wait for it.
                with contextlib.suppress(OSError, RuntimeError):
                    client.set_timeout(timedelta(seconds=1))
                    delete_keys(client, spec.prefix)
        finally:
            self._over.set()

    def _dial(self, deadline: float) -> TCPStore:
        """A client of the store. A plain socket asks first: TCPStore's own connect retries and cannot be stopped
        early. Raises HandoffError."""
        spec = self.spec
        try:
            probe_s = min(_DIAL_S, spec.connect_timeout_s)
            socket.create_connection((spec.host, spec.port), timeout=probe_s).close()
            return TCPStore(spec.host, spec.port, None, False, _until(deadline), False)
        except (OSError, RuntimeError) as e:
            raise spec.error(f"the decode worker's store does not answer: {str(e).splitlines()[0]}") from e

    def _await_peer(self, client: Store, deadline: float) -> None:
        pause_s, peer = _POLL_MIN_S, f"{self.spec.prefix}/{_HERE}/{self.spec.peer_rank}"
        while not client.check([peer]):
            self._aborted.wait(pause_s)
            self._check_aborted()
            if time.monotonic() >= deadline:
                raise self.spec.error(f"the other end did not come within {self.spec.connect_timeout_s:.1f} s")
            pause_s = min(pause_s * 1.5, _POLL_MAX_S)

    def _check_aborted(self) -> None:
        if self.aborted:
            raise self.spec.error("aborted before it connected")

    def _free(self) -> None:
        """On a thread of its own: more than once, since a client that is being made dials again for a while."""
        pause_s = GRACE_S
        while not self._over.wait(pause_s):
            free_from(self.spec.port, self._thread)
            pause_s = _POLL_MAX_S


def delete_keys(client: Store, prefix: str) -> None:
    """Deletes what the two ends of an edge leave under `prefix`: their own keys and those of the group.

    By name: torch lists keys with the interpreter's lock held (measured), so that a store that is stopped would stop
    this process too.
    """
    for name in _NAMES:
        client.delete_key(f"{prefix}/{name}")


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.01))
