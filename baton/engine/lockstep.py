"""How the ranks of one worker stay together: only the leader decides, its followers replay.

Life of a channel. The leader listens on a free port of its named host and leaves address and token in the job's store
(`LeaderChannel`). Each follower dials, shows the token, its rank and its pid, and is counted in (`FollowerChannel`);
anything else that connects is closed. From then on one TCP connection per follower carries frames (baton.rpc.frames) in
order: plans and orders down, reports up, a heartbeat each second both ways. One control thread per process reads them.
A connection that ends, or is silent for longer than a peer may be, is a lost rank: `on_lost` hears of it once, from the
control thread, and the process is to end, for a worker with a rank missing can compute nothing more. A drained leader
sends `Stop` first: then the ends of connections mean nothing.

A follower's control thread hands plans to the compute thread (`follow`). Any other frame is an order for `on_order`. An
order with an attribute `after_step` is kept back until the plan of that step has been computed here.
"""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from baton.core.errors import RankLost, StartupError
from baton.core.step import StepOutcome, StepPlan
from baton.rpc.frames import Failed, FrameError, FrameReader, Heartbeat, Hello, Stop, encode

CONNECT_TIMEOUT_S = 60.0
HEARTBEAT_S = 1.0
SILENCE_S = 4.0
LOADING_SILENCE_S = 60.0
"""While a model is being loaded its control thread may not run for a while: one large tensor is read in one go."""

_HELLO_TIMEOUT_S = 5.0
_HELLO_BYTES = 1024
_SEND_TIMEOUT_S = 4.0
_READ_BYTES = 1 << 18
_NO_STEP = -1

OnLost = Callable[[RankLost], None]


class Store(Protocol):
    """What is needed of torchrun's store. `get` waits as long as the store was told to, then raises RuntimeError."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Peer:
    """One end of a connection: frames out from any thread, frames in by the control thread."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self.heard = time.monotonic()
        self._socket = sock
        self._reader = FrameReader()
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_SEND_TIMEOUT_S)

    @property
    def name(self) -> str:
        return "the leader" if self.rank == 0 else f"rank {self.rank}"

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Raises RankLost when the peer is gone or takes nothing for _SEND_TIMEOUT_S."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise RankLost(f"{self.name} is gone: {error.strerror or error}") from None

    def receive(self) -> list[Any]:
        """What has arrived, or after at most the socket's timeout RankLost."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise RankLost(f"{self.name} is gone: {error.strerror or error}") from None
        if not data:
            raise RankLost(f"{self.name} is gone: its connection ended")
        try:
            frames = self._reader.feed(data)
        except FrameError as error:
            raise RankLost(f"{self.name} sent a bad frame: {error.message}") from None
        self.heard = time.monotonic()
        return frames

    def check_heard(self, silence_s: float) -> None:
        silent_s = time.monotonic() - self.heard
        if silent_s > silence_s:
            raise RankLost(f"{self.name} is silent for {silent_s:.1f} s")

    def close(self) -> None:
        self._socket.close()


class Channel:
    """What both ends have: peers, the control thread, and `lost`, the first thing that went wrong."""

    def __init__(self, peers: list[Peer], on_lost: OnLost | None) -> None:
        self.lost: RankLost | None = None
        self._peers = peers
        self._on_lost = on_lost
        self._silence_s = LOADING_SILENCE_S
        self._ended = threading.Event()
        self._losing = threading.Lock()
        self._thread = threading.Thread(target=self._control, name="lockstep", daemon=True)

    def serving(self) -> None:
        """All ranks have loaded: from now on a silent peer is soon a lost one."""
        self._silence_s = SILENCE_S

    def fail(self, message: str) -> None:
        """Tells the peers why this process ends, as well as it can."""
        self._ended.set()
        for peer in self._peers:
            try:
                peer.send(encode(Failed(message)))
            except RankLost:
                continue

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * HEARTBEAT_S)
        for peer in self._peers:
            peer.close()

    def handle(self, peer: Peer, frame: Any) -> None:
        """A frame other than a heartbeat, on the control thread."""
        raise NotImplementedError

    def _lose(self, error: RankLost) -> None:
        with self._losing:
            if self._ended.is_set() or self.lost is not None:
                return
            self.lost = error
        if self._on_lost is not None:
            self._on_lost(error)

    def _control(self) -> None:
        number, due = 0, 0.0
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ, peer)
            while not self._ended.is_set() and self.lost is None:
                try:
                    for key, _ in selector.select(max(0.0, min(due - time.monotonic(), HEARTBEAT_S))):
                        for frame in key.data.receive():
                            self._take(key.data, frame)
                    if time.monotonic() >= due:
                        number, due = number + 1, time.monotonic() + HEARTBEAT_S
                        self._beat(number)
                except RankLost as error:
                    self._lose(error)

    def _take(self, peer: Peer, frame: Any) -> None:
        if isinstance(frame, Failed):
            raise RankLost(f"{peer.name}: {frame.message}")
        if not isinstance(frame, Heartbeat):
            self.handle(peer, frame)

    def _beat(self, number: int) -> None:
        for peer in self._peers:
            peer.check_heard(self._silence_s)
            peer.send(encode(Heartbeat(number)))


class LeaderChannel(Channel):
    """Rank 0's end. `pids` has one entry per rank, its own first. `on_report(rank, frame)` gets what followers send."""

    def __init__(
        self,
        peers: list[Peer],
        pids: tuple[int, ...],
        on_lost: OnLost | None = None,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> None:
        super().__init__(peers, on_lost)
        self.pids = pids
        self.on_report = on_report
        self._order = threading.Lock()
        self._thread.start()

    @classmethod
    def open(
        cls, store: Store, size: int, host: str, on_lost: OnLost | None = None, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> LeaderChannel:
        """Waits for the followers. Raises StartupError if one does not come, by its rank."""
        token = secrets.token_hex(16)
        peers: dict[int, Peer] = {}
        pids = {0: os.getpid()}
        with _listen(host) as listener:
            port = listener.getsockname()[1]
            store.set("lockstep", f"{token} {host} {port}")
            deadline = time.monotonic() + timeout_s
            while len(peers) < size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    missing = [rank for rank in range(1, size) if rank not in peers]
                    for peer in peers.values():
                        peer.close()
                    raise StartupError(f"ranks {missing} did not come within {timeout_s:g} s") from None
                hello = _greet(sock, token, deadline)
                if hello is None or not 0 < hello.rank < size or hello.rank in peers:
                    sock.close()
                    continue
                peers[hello.rank], pids[hello.rank] = Peer(sock, hello.rank), hello.pid
        ranks = sorted(pids)
        return cls([peers[rank] for rank in ranks[1:]], tuple(pids[rank] for rank in ranks), on_lost)

    def send(self, frame: object) -> None:
        """To every follower, in the order of calls. Raises RankLost."""
        data = encode(frame)
        try:
            with self._order:
                for peer in self._peers:
                    peer.send(data)
        except RankLost as error:
            self._lose(error)
            raise

    def stop(self, reason: str) -> None:
        """Ends the followers well."""
        self._ended.set()
        for peer in self._peers:
            try:
                peer.send(encode(Stop(reason)))
            except RankLost:
                continue
        self.close()

    def handle(self, peer: Peer, frame: Any) -> None:
        if isinstance(frame, Hello | Stop | StepPlan):
            raise RankLost(f"{peer.name} sent a {type(frame).__name__} to the leader")
        if self.on_report is not None:
            self.on_report(peer.rank, frame)


class FollowerChannel(Channel):
    """Another rank's end. `on_order(frame)` gets what the leader sends besides plans."""

    def __init__(self, leader: Peer, on_lost: OnLost | None = None) -> None:
        super().__init__([leader], on_lost)
        self.on_order: Callable[[Any], None] | None = None
        self._leader = leader
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._computed = _NO_STEP
        self._thread.start()

    @classmethod
    def open(cls, store: Store, rank: int, on_lost: OnLost | None = None) -> FollowerChannel:
        """Dials the leader. Raises StartupError if there is none."""
        try:
            token, host, port = store.get("lockstep").decode().split()
            sock = socket.create_connection((host, int(port)), timeout=_HELLO_TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as error:
            raise StartupError(f"rank {rank} finds no leader: {str(error).splitlines()[0]}") from None
        leader = Peer(sock, 0)
        try:
            leader.send(encode(Hello(token, rank, os.getpid())))
        except RankLost as error:
            raise StartupError(error.message) from None
        return cls(leader, on_lost)

    def report(self, frame: object) -> None:
        """To the leader, from any thread. Raises RankLost."""
        try:
            self._leader.send(encode(frame))
        except RankLost as error:
            self._lose(error)
            raise

    def follow(self, step: Callable[[StepPlan], StepOutcome]) -> str:
        """Computes what the leader plans, on the calling thread, until it is told to stop; returns the reason. Raises
        RankLost when the leader is gone."""
        while True:
            frame = self._next()
            match frame:
                case Stop(reason):
                    self._ended.set()
                    return reason
                case StepPlan():
                    step(frame)
                    self._computed = frame.step_id
                case _:
                    self._obey(frame)

    def handle(self, peer: Peer, frame: Any) -> None:
        waits = getattr(frame, "after_step", _NO_STEP) > self._computed
        if isinstance(frame, Stop | StepPlan) or waits:
            self._work.put(frame)
        else:
            self._obey(frame)

    def _lose(self, error: RankLost) -> None:
        super()._lose(error)
        self._work.put(None)

    def _next(self) -> Any:
        frame = self._work.get()  # ends: the control thread hears the leader, or loses it and says so
        if frame is None:
            raise self.lost or RankLost("the leader is gone")
        return frame

    def _obey(self, order: Any) -> None:
        if self.on_order is not None:
            self.on_order(order)


def _listen(host: str) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        raise StartupError(f"lockstep: cannot listen on {host}: {error.strerror or error}") from None
    return listener


def _greet(sock: socket.socket, token: str, deadline: float) -> Hello | None:
    """The Hello of a connection that knows the token, or None."""
    reader, until = FrameReader(_HELLO_BYTES), min(deadline, time.monotonic() + _HELLO_TIMEOUT_S)
    try:
        while (left_s := until - time.monotonic()) > 0:
            sock.settimeout(left_s)
            data = sock.recv(4096)
            frames = reader.feed(data)
            if frames or not data:
                hello = frames[0] if len(frames) == 1 else None
                known = isinstance(hello, Hello) and hmac.compare_digest(hello.token.encode(), token.encode())
                return hello if known else None
    except (OSError, FrameError):
        return None
    return None
