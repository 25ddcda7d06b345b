"""Ends what hangs on this node when its job is over on another: `NodeWatch`, for the agent of a job over several nodes.

Ranks end by themselves, within seconds, when one of their worker has ended or is silent. One that hangs does not, and
where no other rank runs beside it nobody on its node would see: its agent would wait for it for ever, and the worker
with it. So every agent says in the job's store, kept by node 0, that it lives, and when it ends. Ranks that are still
there a while after another node has left, or has said nothing for as long as the store may take to answer, are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from launch.bounded_store import BoundedStore
from launch.rendezvous import SILENCE_S, mark

GRACE_S = 10.0
"""From the end of a job on another node to the end of the ranks here. One that lives needs 4.5 s (`baton.worker_ranks`)
unless it is loading; it would only load for nobody."""
LOOK_S = 1.0
LEAVE_S = 5.0  # for telling the others at the end


class NodeWatch:
    """A thread of the agent. Complete state: the job's store once it is connected, what the other nodes said last and
    when, why the job is over (empty: it is not, as far as is known here), and which ranks were killed because of it.

    `connect` opens a connection to the store for this thread alone, or raises RuntimeError. `ranks` are the processes
    of this node's ranks, asked for when they are needed.
    """

    def __init__(
        self,
        connect: Callable[[], BoundedStore],
        rank: int,
        nodes: int,
        ranks: Callable[[], Sequence[int]],
        say: Callable[[str], None],
    ) -> None:
        self.over = ""
        self.killed: frozenset[int] = frozenset()
        self._connect, self._rank = connect, rank
        self._store: BoundedStore | None = None
        self._others = [node for node in range(nodes) if node != rank]
        self._heard: dict[int, tuple[str, float]] = {}
        self._ranks, self._say = ranks, say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """This node's ranks have ended: the others hear of it, and nothing is killed here any more."""
        self._ended.set()
        self._thread.join(LEAVE_S)
        if self.over or self._store is None:
            return
        if self._thread.is_alive():
            self._say(f"the other nodes of this job were not told that this one has left: no answer in {LEAVE_S:g} s")
            return
        with contextlib.suppress(RuntimeError):  # node 0 was quicker
            self._store.set(mark("left", self._rank), "here")

    def reason(self, pid: int) -> str:
        """Why that rank was killed; empty when it was not, here."""
        if pid not in self.killed:
            return ""
        return f"it hung: it did not end within {GRACE_S:g} s after {self.over}, so its agent killed it"

    def _run(self) -> None:
        try:
            store = self._store = self._connect()
            looks = 0
            while not self.over:
                store.set(mark("alive", self._rank), str(looks := looks + 1))
                self.over = self._who_left(store, time.monotonic())
                if self._ended.wait(LOOK_S):
                    return
        except RuntimeError:  # torch's own, or no answer
            self.over = "the store of the job, kept by NODE_RANK 0, was gone"
        self._clear()

    def _who_left(self, store: BoundedStore, now: float) -> str:
        for node in self._others:
            if store.check([mark("left", node)]):
                return f"NODE_RANK {node} had left the job"
            said = store.read(mark("alive", node))
            if node not in self._heard or said != self._heard[node][0]:
                self._heard[node] = said, now
            elif now - self._heard[node][1] >= SILENCE_S:
                return f"the agent of NODE_RANK {node} had been silent for {SILENCE_S:g} s"
        return ""

    def _clear(self) -> None:
        if self._ended.wait(GRACE_S):
            return
        self.killed = frozenset(self._ranks())
        for pid in self.killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.killed:
            pids = ", ".join(map(str, sorted(self.killed)))
            self._say(f"{GRACE_S:g} s ago {self.over}, and ranks still ran here: killed pid {pids}")
