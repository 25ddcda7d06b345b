"""Keeps the ranks of one worker in lockstep: only the leader schedules, its followers replay its steps.

Life cycle of a channel. The followers dial the leader (baton.engine.rank_peer). Then one TCP connection per follower
carries frames (baton.runtime.frames) in order: plans and orders from the leader, reports to it, a heartbeat each second
in both directions. One control thread per process reads them. If a connection closes or is silent for too long, its
rank is lost: `on_lost` is called once, on the thread that detects it, and the process must end, because a worker cannot
compute without all its ranks. A drained leader sends `RankStop` first: closed connections are then ignored.

A follower's control thread passes plans, and adapters to drop, to the compute thread (`follow`). Any other frame is an
order (`set_order_handler`), executed immediately on the control thread or, if it has an attribute `after_step` and that
step is not computed yet, on the compute thread right after that step. Step numbers rise.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from baton.core.errors import RankLost
from baton.core.liveness import LOADING_SILENCE_S, MAX_READ_GAP_S, RANK_HEARTBEAT_S, RANK_SILENCE_S, ListeningClock
from baton.core.plan_tables import PlanTables, ShortPlan
from baton.core.step import StepOutcome, StepPlan
from baton.engine.rank_peer import CONNECT_TIMEOUT_S, RankPeer, Store, dial_leader, gather_followers
from baton.runtime.frames import DropAdapter, Failed, Hello, Lost, RankHeartbeat, RankLeave, RankStop, encode

log = logging.getLogger("baton.lockstep")

_GOODBYE_S = 2.0
_NO_STEP = -1

OnLost = Callable[[RankLost], None]


class RankFailed(RankLost):
    """The other rank reported why it ends."""


class Channel:
    """The base of both ends: peers, the control thread, and `lost`, the first error."""

    def __init__(self, peers: list[RankPeer], on_lost: OnLost | None) -> None:
        self.lost: RankLost | None = None
        self._peers = peers
        self._on_lost = on_lost
        self._silence_s = LOADING_SILENCE_S
        self._clock = ListeningClock(time.monotonic(), MAX_READ_GAP_S)
        self._ended = threading.Event()
        self._losing = threading.Lock()
        self._order = threading.Lock()
        self._thread = threading.Thread(target=self._control, name="lockstep", daemon=True)

    def serving(self) -> None:
        """Applies the silence limit RANK_SILENCE_S, when all ranks have loaded."""
        self._silence_s = RANK_SILENCE_S

    def fail(self, message: str) -> None:
        """Sends the peers the reason why this process ends, and closes the channel."""
        self._send_final(Failed(message))
        self.close(wait_s=0.1)

    def close(self, wait_s: float = _GOODBYE_S) -> None:
        """Shuts down the connections, waits up to `wait_s` for the peers to do the same, and frees them."""
        self._ended.set()
        for peer in self._peers:
            peer.hang_up()
        self._thread.join(wait_s)
        for peer in self._peers:
            peer.close()

    def handle(self, peer: RankPeer, frame: Any) -> None:
        """Handles a frame other than Heartbeat or Failed, on the control thread."""
        raise NotImplementedError

    def _send(self, peers: list[RankPeer], frame: object) -> None:
        data = encode(frame)
        try:
            with self._order:
                for peer in peers:
                    peer.send(data)
        except RankLost as error:
            self.lose(error)
            raise

    def _send_final(self, frame: object) -> None:
        self._ended.set()
        for peer in self._peers:
            with contextlib.suppress(RankLost):
                peer.send(encode(frame))

    def lose(self, error: RankLost) -> None:
        """Records the first loss and calls `on_lost`. A rank that runs but misses a deadline is lost, too."""
        with self._losing:
            if self._ended.is_set() or self.lost is not None:
                return
            self.lost = error
        self.report_loss(error)
        if self._on_lost is not None:
            self._on_lost(error)

    def report_loss(self, error: RankLost) -> None:
        """Called before `on_lost`, on the same thread."""

    def _control(self) -> None:
        try:
            self._exchange()
        except Exception as error:  # a failing order or report must not silently end this thread
            if not self._ended.is_set():
                log.exception("lockstep: an order or report failed")
            self.lose(RankLost(f"lockstep failed: {type(error).__name__}: {error}"))

    def _exchange(self) -> None:
        number, due, last_beats = 0, 0.0, int(_GOODBYE_S / RANK_HEARTBEAT_S)
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ, peer)
            while selector.get_map() and self.lost is None:
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    try:
                        for frame in key.data.receive(self._clock.at(time.monotonic())):
                            self._take(key.data, frame)
                    except RankLost as error:
                        selector.unregister(key.data)
                        self.lose(error)
                now = time.monotonic()
                self._clock.advance(now)
                if now < due:
                    continue
                number, due = number + 1, now + RANK_HEARTBEAT_S
                if self._ended.is_set():
                    last_beats -= 1
                    if last_beats == 0:
                        return
                    continue
                try:
                    self._beat(number)
                except RankLost as error:
                    self.lose(error)

    def _take(self, peer: RankPeer, frame: Any) -> None:
        if isinstance(frame, Failed):
            raise RankFailed(f"{peer.name}: {frame.message}")
        if isinstance(frame, Lost):
            raise RankLost(f"{peer.name}: {frame.message}")
        if not isinstance(frame, RankHeartbeat):
            self.handle(peer, frame)

    def _beat(self, number: int) -> None:
        for peer in self._peers:
            peer.check_silence(self._clock.at(time.monotonic()), self._silence_s)
            peer.send(encode(RankHeartbeat(number)))


class LeaderChannel(Channel):
    """Rank 0's end. `pids` has one entry per rank, its own first. `on_report(rank, frame)` receives reports; see also
    `set_leave_handler`."""

    def __init__(self, peers: list[RankPeer], pids: tuple[int, ...], on_lost: OnLost | None) -> None:
        super().__init__(peers, on_lost)
        self.pids = pids
        self.on_report: Callable[[int, Any], None] | None = None
        self._on_leave: Callable[[int], object] | None = None
        self._leaving: int | None = None
        self._tables = PlanTables()
        self._thread.start()

    @classmethod
    def open(
        cls, store: Store, size: int, host: str, on_lost: OnLost | None = None, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> LeaderChannel:
        """Waits for the followers. Raises StartupError, with the ranks, if some do not connect."""
        peers, pids = gather_followers(store, size, host, timeout_s)
        return cls(peers, pids, on_lost)

    def send(self, frame: object) -> None:
        """Sends a frame to every follower, in the order of calls; plans are sent by one thread. Raises RankLost."""
        self._send(self._peers, self._tables.shorten(frame) if isinstance(frame, StepPlan) else frame)

    def send_to(self, rank: int, frame: object) -> None:
        """Sends a frame to one follower, after all frames sent before. Raises RankLost."""
        self._send([peer for peer in self._peers if peer.rank == rank], frame)

    def set_leave_handler(self, on_leave: Callable[[int], object]) -> None:
        """Sets what is called with the rank of a follower that received SIGTERM, from any thread and perhaps more than
        once; immediately if that was already reported."""
        self._on_leave = on_leave
        if self._leaving is not None:
            on_leave(self._leaving)

    def stop(self, reason: str) -> None:
        """Stops the followers without an error, and closes the channel."""
        self._send_final(RankStop(reason))
        self.close()

    def report_loss(self, error: RankLost) -> None:
        """Reports to the other ranks which one was lost: they would only detect that this process ends."""
        data = encode(Failed(error.message) if isinstance(error, RankFailed) else Lost(error.message))
        for peer in self._peers:
            peer.send_last(data)

    def handle(self, peer: RankPeer, frame: Any) -> None:
        if isinstance(frame, Hello | RankStop | ShortPlan):
            raise RankLost(f"{peer.name} sent an unexpected {type(frame).__name__} to the leader")
        if isinstance(frame, RankLeave):
            self._leaving = peer.rank
            if self._on_leave is not None:
                self._on_leave(peer.rank)
        elif self.on_report is not None:
            self.on_report(peer.rank, frame)


class FollowerChannel(Channel):
    """A follower's end. The leader's frames other than plans and Stop are orders; see `set_order_handler`."""

    def __init__(self, leader: RankPeer, on_lost: OnLost | None) -> None:
        super().__init__([leader], on_lost)
        self._on_order: Callable[[Any], None] | None = None
        self._early: list[Any] = []
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._computed = _NO_STEP
        self._later: list[Any] = []
        self._tables = PlanTables()
        self._computing = threading.Lock()  # guards _computed, _later and _early
        self._thread.start()

    @classmethod
    def open(cls, store: Store, rank: int, on_lost: OnLost | None = None) -> FollowerChannel:
        """Dials the leader. Raises StartupError if there is none."""
        return cls(dial_leader(store, rank), on_lost)

    def set_order_handler(self, on_order: Callable[[Any], None]) -> None:
        """Sets the handler of orders, and passes it those already received: another rank may have loaded earlier than
        this one."""
        with self._computing:
            for order in self._early:
                on_order(order)
            self._early = []
            self._on_order = on_order

    def report(self, frame: object) -> None:
        """Sends a frame to the leader, from any thread. Raises RankLost."""
        self._send(self._peers, frame)

    def leave(self) -> None:
        """Asks the leader to drain the worker, from any thread; without effect if the leader is lost or has drained."""
        with contextlib.suppress(RankLost):
            self._send(self._peers, RankLeave())

    def follow(
        self, step: Callable[[StepPlan], StepOutcome], drop_adapter: Callable[[str], None] = lambda digest: None
    ) -> str:
        """Computes the leader's plans on the calling thread until the leader sends Stop; returns its reason. Raises
        RankLost when the leader is lost."""
        while True:
            frame = self._work.get()  # returns: the control thread enqueues a frame, or None once the leader is lost
            if frame is None:
                raise self.lost or RankLost("lost the connection to the leader")
            if isinstance(frame, RankStop):
                return frame.reason
            if isinstance(frame, DropAdapter):
                drop_adapter(frame.digest)
                continue
            step(frame)
            with self._computing:
                self._computed = max(self._computed, frame.step_id)  # steps that only measure have number 0
                due = [order for order in self._later if order.after_step <= self._computed]
                self._later = [order for order in self._later if order.after_step > self._computed]
            for order in due:
                self._execute_order(order)

    def handle(self, peer: RankPeer, frame: Any) -> None:
        if isinstance(frame, RankStop):
            self._ended.set()
        if isinstance(frame, RankStop | ShortPlan | DropAdapter):
            self._work.put(self._tables.lengthen(frame) if isinstance(frame, ShortPlan) else frame)
            return
        with self._computing:
            if getattr(frame, "after_step", _NO_STEP) > self._computed:
                self._later.append(frame)
                return
        self._execute_order(frame)

    def lose(self, error: RankLost) -> None:
        super().lose(error)
        self._work.put(None)

    def _execute_order(self, order: Any) -> None:
        with self._computing:
            if self._on_order is None:
                self._early.append(order)
                return
        self._on_order(order)
