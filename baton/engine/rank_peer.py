"""One connection between two ranks of a worker: connecting, authentication, and detection of its loss.

The leader listens on a free port of its configured host and puts host, port and token into the job's store; a follower
dials, sends the token, its rank and its pid, and gets a reply. Connections without the token are closed without one.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from typing import Any, Protocol

from baton.core.errors import RankLost, StartupError
from baton.core.liveness import RANK_SEND_LIMIT_S
from baton.runtime.frames import FrameError, FrameReader, Hello, RankHeartbeat, encode

log = logging.getLogger("baton.worker")
CONNECT_TIMEOUT_S = 60.0
MEET_TIMEOUT_S = 600.0
"""For the ranks of other nodes, which are started separately."""

_NOTICE_S = 5.0
_HELLO_TIMEOUT_S = 1.0
_HELLO_BYTES = 1024
_READ_BYTES = 1 << 18
_KEY = "lockstep"
ACCEPTED = encode(RankHeartbeat(0))
"""A leader's first frame, which accepts a follower; orders and plans may follow immediately."""


class Store(Protocol):
    """The used part of torchrun's store. `get` waits up to the store's own timeout, then raises RuntimeError."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class RankPeer:
    """One end of a connection: any thread may send frames, the control thread receives them."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self.last_received_at = time.monotonic()
        self._socket = sock
        self._reader = FrameReader()
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(RANK_SEND_LIMIT_S)

    @property
    def name(self) -> str:
        return "the leader" if self.rank == 0 else f"rank {self.rank}"

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Raises RankLost when the connection is broken or does not accept the data within RANK_SEND_LIMIT_S."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            raise RankLost(f"lost the connection to {self.name}: {error.strerror or error}") from None

    def send_last(self, data: bytes) -> None:
        """Sends if that is possible immediately: the peer may be the rank that no longer reads."""
        if self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._socket.send(data, socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def receive(self, now: float) -> list[Any]:
        """Receives frames; `last_received_at` becomes `now`. Raises RankLost, within the socket's timeout."""
        try:
            frames = self._reader.feed(self._some(_READ_BYTES))
        except FrameError as error:
            raise RankLost(f"{self.name} sent a bad frame: {error.message}") from None
        self.last_received_at = now
        return frames

    def await_accepted(self) -> None:
        """Waits for the heartbeat that accepts this rank, and reads no byte beyond it."""
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        answer = b""
        while len(answer) < len(ACCEPTED):
            answer += self._some(len(ACCEPTED) - len(answer))
        if answer != ACCEPTED:
            raise RankLost(f"{self.name} sent an unexpected reply")
        self._socket.settimeout(RANK_SEND_LIMIT_S)

    def _some(self, max_bytes: int) -> bytes:
        """Receives at least one byte. Raises RankLost."""
        try:
            data = self._socket.recv(max_bytes)
        except OSError as error:
            raise RankLost(f"lost the connection to {self.name}: {error.strerror or error}") from None
        if not data:
            raise RankLost(f"lost the connection to {self.name}: closed by the peer")
        return data

    def check_silence(self, now: float, silence_s: float) -> None:
        silent_s = now - self.last_received_at
        if silent_s > silence_s:
            raise RankLost(f"{self.name} was silent for {silent_s:.1f} s")

    def hang_up(self) -> None:
        """Shuts down the sending side; data already sent still arrives. `close` frees the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def gather_followers(
    store: Store, size: int, host: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> tuple[list[RankPeer], tuple[int, ...]]:
    """Waits for the followers; returns them and the pids of all ranks. Raises StartupError, with the missing ranks,
    after `timeout_s`."""
    token = secrets.token_hex(16)
    peers: dict[int, RankPeer] = {}
    pids = {0: os.getpid()}
    deadline, waits_for = time.monotonic() + timeout_s, ""
    look_at = time.monotonic() + _NOTICE_S
    with _listen(host) as listener:
        store.set(_KEY, f"{token} {host} {listener.getsockname()[1]}")
        while len(peers) < size - 1:
            listener.settimeout(max(min(deadline, look_at) - time.monotonic(), 0.001))
            with contextlib.suppress(TimeoutError):
                sock, _ = listener.accept()
                hello = _greet(sock, token)
                if hello is None or not 0 < hello.rank < size or hello.rank in peers:
                    sock.close()
                else:
                    peers[hello.rank], pids[hello.rank] = RankPeer(sock, hello.rank), hello.pid
                    _keep(peers)  # accepts it
            if (now := time.monotonic()) < look_at and now < deadline:
                continue
            look_at = now + _NOTICE_S
            _keep(peers)
            missing = ", ".join(str(rank) for rank in range(1, size) if rank not in peers)
            if missing and now >= deadline:
                for peer in peers.values():
                    peer.close()
                raise StartupError(f"rank {missing} did not connect within {timeout_s:g} s")
            if missing and missing != waits_for:
                log.info("waiting up to %.0f s for rank %s of this worker", timeout_s, waits_for := missing)
    for peer in peers.values():
        peer.last_received_at = time.monotonic()  # their frames have not been read meanwhile
    ranks = range(size)
    return [peers[rank] for rank in ranks[1:]], tuple(pids[rank] for rank in ranks)


def _keep(peers: dict[int, RankPeer]) -> None:
    """Sends a frame to all connected followers: the first one accepts a follower, later ones are heartbeats. A lost
    follower is dropped, so that its successor can connect."""
    for rank, peer in list(peers.items()):
        try:
            peer.send(ACCEPTED)
        except RankLost:
            peer.close()
            del peers[rank]


def dial_leader(store: Store, rank: int) -> RankPeer:
    """Connects to the leader. Raises StartupError if there is none or it does not reply."""
    try:
        token, host, port = store.get(_KEY).decode().split()
        sock = socket.create_connection((host, int(port)), timeout=RANK_SEND_LIMIT_S)
    except (OSError, RuntimeError, ValueError) as error:
        raise StartupError(f"rank {rank} cannot connect to the leader: {str(error).splitlines()[0]}") from None
    leader = RankPeer(sock, 0)
    try:
        leader.send(encode(Hello(token, rank, os.getpid())))
        leader.await_accepted()
    except RankLost as error:
        raise StartupError(f"rank {rank} was refused by the leader: {error.message}") from None
    return leader


def _listen(host: str) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        raise StartupError(f"lockstep: cannot listen on {host}: {error.strerror or error}") from None
    return listener


def _greet(sock: socket.socket, token: str) -> Hello | None:
    """Returns a connection's Hello, or None if its token is not valid. A follower sends no more before the reply."""
    reader, until = FrameReader(_HELLO_BYTES), time.monotonic() + _HELLO_TIMEOUT_S
    try:
        while (left_s := until - time.monotonic()) > 0:
            sock.settimeout(left_s)
            data = sock.recv(_HELLO_BYTES)
            frames = reader.feed(data)
            if frames or not data:
                hello = frames[0] if len(frames) == 1 else None
                known = isinstance(hello, Hello) and hmac.compare_digest(hello.token.encode(), token.encode())
                return hello if known else None
    except (OSError, FrameError):
        return None
    return None
