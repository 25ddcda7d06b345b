"""Ends what hangs on this node when its job is over on another: `NodeWatch`, for the agent of a job over several nodes.

Ranks end by themselves, within seconds, when one of their worker has ended or is silent. One that hangs does not, and
where no other rank runs beside it nobody on its node would see: its agent would wait for it for ever, and the worker
with it. So every agent leaves word in the job's store when it ends, or when it comes again and the job has begun; the
store itself ends with node 0. Ranks that are still there a while after that are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from launch.rendezvous import Marks, mark

GRACE_S = 10.0
"""From the end of a job on another node to the end of the ranks here. One that lives needs 4.5 s (`baton.worker_ranks`)
unless it is loading; it would only load for nobody."""
LOOK_S = 1.0


class NodeWatch:
    """A thread of the agent. Complete state: the job's store once it is connected, why the job is over (empty: it is
    not, as far as is known here), and which ranks were killed because of it.

    `connect` opens a connection to the store for this thread alone, or raises RuntimeError. `ranks` are the processes
    of this node's ranks, asked for when they are needed.
    """

    def __init__(
        self,
        connect: Callable[[], Marks],
        rank: int,
        nodes: int,
        ranks: Callable[[], Sequence[int]],
        say: Callable[[str], None],
    ) -> None:
        self.over = ""
        self.killed: frozenset[int] = frozenset()
        self._connect, self._rank = connect, rank
        self._store: Marks | None = None
        self._others = [node for node in range(nodes) if node != rank]
        self._ranks, self._say = ranks, say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """This node's ranks have ended: the others hear of it, and nothing is killed here any more."""
        self._ended.set()
        self._thread.join(LOOK_S)
        if not self._thread.is_alive() and self._store is not None:  # else it does not answer, and nobody would hear
            with contextlib.suppress(RuntimeError):
                self._store.set(mark("left", self._rank), "here")

    def reason(self, pid: int) -> str:
        """Why that rank was killed; empty when it was not, here."""
        if pid not in self.killed:
            return ""
        return f"it hung: it did not end within {GRACE_S:g} s after {self.over}, so its agent killed it"

    def _run(self) -> None:
        try:
            self._store = self._connect()
            left: list[int] = []
            while not left:
                if self._ended.wait(LOOK_S):
                    return
                left = [node for node in self._others if self._store.check([mark("left", node)])]
            self.over = f"NODE_RANK {left[0]} had left the job"
        except RuntimeError:  # torch's own
            self.over = "the store of the job, kept by NODE_RANK 0, was gone"
        self._clear()

    def _clear(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if self._ended.wait(LOOK_S) or not self._ranks():
                return
        self.killed = frozenset(self._ranks())
        for pid in self.killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.killed:
            pids = ", ".join(map(str, sorted(self.killed)))
            self._say(f"{GRACE_S:g} s ago {self.over}, and ranks still ran here: killed pid {pids}")
