"""How the two ends of an edge meet before a process group is built.

A group's constructor blocks until its peer has come and cannot be stopped from outside. So each end first leaves a
key in the store and polls for the other's, which an abort ends within one poll; the constructor then takes
milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event

from torch._C._distributed_c10d import Store

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.store import delete_keys, dial, scoped

_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.02


@contextmanager
def meet(spec: EdgeSpec, aborted: Event) -> Iterator[tuple[Store, float]]:
    """Yields the edge's own store and the instant (monotonic) by which the edge must stand, once both ends are there.

    What the body raises as RuntimeError becomes a HandoffError. Afterwards, or on failure, the keys of this
    generation are deleted; the store's connection closes with the store object. Raises HandoffError when the store
    does not answer, the peer does not come within `connect_timeout_s`, or `aborted` is set.
    """
    deadline = time.monotonic() + spec.connect_timeout_s
    if aborted.is_set():
        raise spec.error("aborted before it connected")
    client = dial(spec, spec.connect_timeout_s)
    try:
        client.set(f"{spec.prefix}/here/{spec.rank}", "1")
        _await_peer(spec, client, deadline, aborted)
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
            pass  # the store went away with its worker, and its keys with it


def _await_peer(spec: EdgeSpec, client: Store, deadline: float, aborted: Event) -> None:
    pause_s, peer = _POLL_MIN_S, f"{spec.prefix}/here/{spec.peer_rank}"
    while not client.check([peer]):
        if aborted.wait(pause_s):
            raise spec.error("aborted before it connected")
        if time.monotonic() >= deadline:
            raise spec.error(f"the other end did not come within {spec.connect_timeout_s:.1f} s")
        pause_s = min(pause_s * 1.5, _POLL_MAX_S)
