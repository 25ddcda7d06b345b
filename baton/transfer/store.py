"""The store where the ends of a decode worker's edges find each other.

One per decode worker, on one named address. The address is enforced with a listening socket of our own: a TCPStore
that opens its own socket listens on every interface, whatever host it is given.
"""

from __future__ import annotations

import secrets
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from baton.core.errors import HandoffError, StartupError
from baton.transfer.edge import EdgeSpec

HERE = "here"
"""What an end's first key is called: prefix/here/rank."""
_NAMES = (f"{HERE}/0", f"{HERE}/1", "0/0", "0/1", "0:1")  # the ends' own, Gloo's, NCCL's (read in its source, not run)
_CALL_TIMEOUT_S = 5.0
_DIAL_S = 1.0


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
            family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, proto)
        except OSError as e:
            raise StartupError(f"edge store: cannot use address {host}: {e}") from e
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(256)
            self.port: int = listener.getsockname()[1]
            # The store's C++ server takes the descriptor over and closes it.
            self._store: TCPStore | None = TCPStore(
                host, self.port, None, True, timedelta(seconds=_CALL_TIMEOUT_S), False, False, listener.fileno(), True
            )
            listener.detach()
        except (OSError, RuntimeError) as e:
            listener.close()
            raise StartupError(f"edge store: cannot listen on {host}:{port}: {e}") from e

    def close(self) -> None:
        """Stops listening and drops every connection to the store. Edges already made do not need it."""
        self._store = None

    def _open(self) -> TCPStore:
        if self._store is None:
            raise HandoffError(f"edge store {self.host}:{self.port} is closed")
        return self._store

    def __repr__(self) -> str:
        return f"<EdgeStore {self.host}:{self.port}{'' if self._store else ' closed'}>"


def dial(spec: EdgeSpec, timeout_s: float) -> TCPStore:
    """A client of the decode worker's store; raises HandoffError when none answers within `timeout_s`.

    A plain socket asks first: TCPStore's own connect retries and cannot be told to stop early.
    """
    start = time.monotonic()
    try:
        socket.create_connection((spec.host, spec.port), timeout=min(_DIAL_S, timeout_s)).close()
        timeout = timedelta(seconds=max(timeout_s - (time.monotonic() - start), 0.01))
        return TCPStore(spec.host, spec.port, None, False, timeout, False)
    except (OSError, RuntimeError) as e:
        raise spec.error(f"the decode worker's store does not answer: {str(e).splitlines()[0]}") from e


def scoped(spec: EdgeSpec, client: TCPStore) -> Store:
    """The store as a process group of this edge generation sees it."""
    return PrefixStore(spec.prefix, client)


def delete_keys(client: Store, prefix: str) -> None:
    """Deletes what the two ends of an edge leave under `prefix`: their own keys and those of the group.

    By name: torch lists keys with the interpreter's lock held (measured), so that a store that is stopped would stop
    this process too.
    """
    for name in _NAMES:
        client.delete_key(f"{prefix}/{name}")
