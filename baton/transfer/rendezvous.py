"""How the two ends of an edge meet before a process group is built.

A group's constructor blocks until its peer has come and cannot be stopped from outside. So each end first leaves a
key in the store and polls for the other's, which an abort ends within one poll; the constructor then takes
milliseconds. A store that says nothing, since its process is stopped or its host has vanished, holds its caller for
ever: an abort ends that by shutting down the connection to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread, get_native_id

from torch._C._distributed_c10d import Store

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.sockets import free_from
from baton.transfer.store import HERE, delete_keys, dial, scoped

GRACE_S = 0.5
_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.02


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
            client = dial(spec, spec.connect_timeout_s)
            try:
                client.set(f"{spec.prefix}/{HERE}/{spec.rank}", "1")
                self._await_peer(client, deadline)
                remaining_s = max(deadline - time.monotonic(), 0.01)
                client.set_timeout(timedelta(seconds=remaining_s))
                yield scoped(spec, client), deadline
            except HandoffError:
                raise
            except (OSError, RuntimeError) as e:
                raise spec.error(f"connecting failed: {str(e).splitlines()[0]}") from e
            finally:
                try:
                    client.set_timeout(timedelta(seconds=1))
                    delete_keys(client, spec.prefix)
                except (OSError, RuntimeError):
                    pass  # the store went away with its worker, and its keys with it; or an abort could not wait for it
        finally:
            self._over.set()

    def _await_peer(self, client: Store, deadline: float) -> None:
        pause_s, peer = _POLL_MIN_S, f"{self.spec.prefix}/{HERE}/{self.spec.peer_rank}"
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
