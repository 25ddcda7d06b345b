"""The network: streams between processes, with what a gRPC stream guarantees and nothing more.

Within one stream and direction messages arrive in order, none twice. A message is lost only by the end of the stream:
then the messages in transit arrive up to some point, another one in each direction, and after them both ends notice the
end. Between streams, and between the two directions of one, nothing is ordered. While a direction is partitioned, its
messages wait, as TCP retransmits; so does the message that the stream has ended.

Stands for grpc.aio and baton/runtime/streams.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.loop import Loop, Timer, cancel
from sim.process import Clock, Process


@dataclass(slots=True)
class NetworkFaults:
    """Probabilities per message: that its stream breaks, and that it takes up to `delay_s` longer."""

    broken: float = 0.0
    delayed: float = 0.0
    delay_s: float = 1.0


@dataclass(slots=True)
class Counters:
    """What happened, so that tests can check that it did."""

    messages: int = 0
    lost: int = 0
    streams: int = 0
    broken: int = 0
    partitions: int = 0
    dials_failed: int = 0


class NetworkProcess(Process):
    """A process with streams."""

    def __init__(self, loop: Loop, name: str, incarnation: int, clock: Clock) -> None:
        super().__init__(loop, name, incarnation, clock)
        self.ends: dict[End, None] = {}  # of its streams; ordered, which a set is not

    def accept(self, end: End, first: Any) -> None:
        """Handles a stream that was dialled to this process; `first` is its first message."""
        end.close(f"{self.name} accepts no streams")

    def die(self, *, silently: bool = False) -> None:
        """Ends the process; its kernel closes its streams. `silently`: as a host that loses power."""
        super().die()
        for end in list(self.ends):
            end.process_died(silently)
        self.ends.clear()


class End:
    """One end of a stream. `on_message` and `on_end` are called until it is closed."""

    __slots__ = (
        "_arrived",
        "_last_at",
        "_limit",
        "_network",
        "_sent",
        "on_end",
        "on_message",
        "open",
        "peer",
        "process",
    )

    def __init__(self, network: Network, process: NetworkProcess) -> None:
        self._network, self.process = network, process
        self.peer: End = self
        self.open = True
        self.on_message: Callable[[Any], object] = _ignore
        self.on_end: Callable[[str], object] = _ignore
        # Of what is sent to this end: when the last message arrives, and how many of them may arrive.
        self._last_at = 0.0
        self._sent = self._arrived = 0
        self._limit: int | None = None
        process.ends[self] = None

    def send(self, message: Any) -> bool:
        """Sends a message; returns False if this end is closed."""
        if not self.open:
            return False
        self._network.transmit(self, message)
        return True

    def close(self, reason: str) -> None:
        """Closes this end now; the other one notices it later, and may not receive all messages in transit."""
        if self.open:
            self._closed()
            self._network.ended(self.peer, reason)

    def break_(self, reason: str) -> None:
        """Breaks the stream: both ends notice it."""
        for end in (self, self.peer):
            self._network.ended(end, reason)

    def process_died(self, silently: bool) -> None:
        self.open = False
        if not silently:
            # What it had sent is in its kernel, which delivers it.
            self._network.ended(self.peer, f"{self.process} died", lossless=True)

    # Of what arrives here.

    def expects(self) -> tuple[int, int]:
        return self._arrived, self._sent

    def stop_at(self, limit: int) -> None:
        self._limit = limit if self._limit is None else min(self._limit, limit)

    def next_arrival(self, at: float) -> float:
        """Returns when something that is sent now, and would arrive `at`, arrives: not before anything sent earlier."""
        self._last_at = max(self._last_at, at)
        return self._last_at

    def count_sent(self) -> int:
        self._sent += 1
        return self._sent

    def arrive(self, number: int, message: Any) -> None:
        self._arrived = number
        if self._limit is not None and number > self._limit:
            self._network.counters.lost += 1
        else:
            self.process.receives(self._receive, message)

    def end_arrives(self, reason: str) -> None:
        self.process.receives(self._end, reason)

    def _receive(self, message: Any) -> None:
        if not self.open:
            return
        if type(message) is _Dialled:
            self.process.accept(self, message.first)
        else:
            self.on_message(message)

    def _end(self, reason: str) -> None:
        if self.open:
            self._closed()
            self.on_end(reason)

    def _closed(self) -> None:
        self.open = False
        self.process.ends.pop(self, None)


@dataclass(frozen=True, slots=True)
class _Dialled:
    first: Any


def _ignore(*args: object) -> None:
    pass


class Network:
    """Streams between processes that listen under their names."""

    def __init__(self, loop: Loop, message_s: Callable[[], float], faults: NetworkFaults | None = None) -> None:
        """`message_s` returns the seconds that one message takes."""
        self.loop, self.faults, self.counters = loop, faults or NetworkFaults(), Counters()
        self._message_s = message_s
        self._listeners: dict[str, NetworkProcess] = {}
        # The directions that are partitioned, with what waits there.
        self._waiting: dict[tuple[str, str], list[tuple[Callable[..., object], tuple[Any, ...]]]] = {}

    def listen(self, process: NetworkProcess) -> None:
        self._listeners[process.name] = process

    def connected(self, source: str, to: str) -> bool:
        return (source, to) not in self._waiting

    def partition(self, source: str, to: str) -> None:
        """Stops one direction between two hosts."""
        if (source, to) not in self._waiting:
            self._waiting[source, to] = []
            self.counters.partitions += 1

    def heal(self, source: str, to: str) -> None:
        for act, args in self._waiting.pop((source, to), []):
            act(*args)

    def heal_all(self) -> None:
        for source, to in list(self._waiting):
            self.heal(source, to)

    def dial(
        self,
        process: NetworkProcess,
        to: str,
        first: Any,
        timeout_s: float,
        opened: Callable[[End, Any], object],
        failed: Callable[[str], object],
    ) -> None:
        """Opens a stream to the process that listens as `to` then, with `first` as its first message. Calls `opened`
        with this end and the first reply, or `failed`; never both."""
        ends: list[End] = []
        timer: Timer | None = None
        over = False

        def fail(reason: str) -> None:
            nonlocal over
            if not over:
                over = True
                cancel(timer)
                self.counters.dials_failed += 1
                for end in ends:
                    end.close(reason)
                failed(reason)

        def reply(message: Any) -> None:
            nonlocal over
            if not over:
                over = True
                cancel(timer)
                opened(ends[0], message)

        def connect() -> None:
            target = self._listeners.get(to)
            if target is None or not target.alive:
                self._send_between(to, process.name, process.receives, fail, "connection refused")
                return
            if over or not process.alive:
                return
            mine, theirs = End(self, process), End(self, target)
            mine.peer, theirs.peer = theirs, mine
            mine.on_message, mine.on_end = reply, fail
            ends.append(mine)
            self.counters.streams += 1
            theirs.count_sent()
            theirs.arrive(1, _Dialled(first))

        timer = process.later(timeout_s, fail, f"no reply in {timeout_s:g} s")
        self.loop.note(process, "dials", to)
        self._send_between(process.name, to, connect)

    def _send_between(self, source: str, to: str, act: Callable[..., object], *args: Any) -> None:
        waiting = self._waiting.get((source, to))
        if waiting is not None:
            waiting.append((self._send_between, (source, to, act, *args)))
        else:
            self.loop.later(self._message_s(), act, *args)

    def transmit(self, source: End, message: Any) -> None:
        end, loop, faults = source.peer, self.loop, self.faults
        self.counters.messages += 1
        if loop.trace is not None:
            loop.note(source.process, "->", end.process, describe(message))
        number = end.count_sent()
        if faults.broken and loop.happens(faults.broken):
            self.break_stream(source, "the connection broke")
        waiting = self._waiting.get((source.process.name, end.process.name))
        if waiting is not None:
            waiting.append((self._transmitted, (end, number, message)))
            return
        after_s = self._message_s()
        if faults.delayed and loop.happens(faults.delayed):
            after_s += loop.random.random() * faults.delay_s
        loop.at(end.next_arrival(loop.now + after_s), end.arrive, number, message)

    def _transmitted(self, end: End, number: int, message: Any) -> None:
        """A message that waited for the end of a partition continues."""
        self.loop.at(end.next_arrival(self.loop.now + self._message_s()), end.arrive, number, message)

    def break_stream(self, end: End, reason: str) -> None:
        self.counters.broken += 1
        self.loop.note("break", end.process, end.peer.process)
        end.break_(reason)

    def ended(self, end: End, reason: str, *, lossless: bool = False) -> None:
        """The stream of `end` ends: it receives some of the messages in transit, or all, and then the end."""
        arrived, sent = end.expects()
        end.stop_at(sent if lossless else self.loop.random.randint(arrived, sent))
        source, to = end.peer.process.name, end.process.name
        waiting = self._waiting.get((source, to))
        if waiting is not None:
            waiting.append((self._end_transmitted, (end, reason)))
        else:
            self._end_transmitted(end, reason)

    def _end_transmitted(self, end: End, reason: str) -> None:
        self.loop.at(end.next_arrival(self.loop.now + self._message_s()), end.end_arrives, reason)


def describe(message: Any) -> str:
    """Returns one line about a message: its type and what identifies it."""
    name = type(message).__name__
    describes = getattr(message, "sequence", None)
    if describes is not None:
        extra = [getattr(message, key) for key in ("index", "ok", "code", "attempt") if hasattr(message, key)]
        return " ".join(map(str, (name, describes, *extra)))
    request = getattr(message, "request", None)
    if request is not None:
        return f"{name} {request.sequence_id} +{len(request.output)}"
    if name == "StepEvents":
        parts = [f"{e.sequence}[{e.first_index}]={','.join(map(str, e.tokens))}" for e in message.tokens]
        parts += [f"{e.sequence} ended {e.reason} {e.code or ''}" for e in message.ended]
        parts += [f"{e.sequence} parked" for e in message.parked]
        parts += [f"{e.sequence} handed over to {e.decode_worker}" for e in message.handed_over]
        return f"{name} {message.step_id} {'; '.join(parts)}"
    if name == "Welcome":
        return f"{name} {' '.join(f'{t.sequence}:{t.next_index}:{t.here:d}' for t in message.tracked)}"
    if name == "ReleaseRecords":
        return f"{name} {' '.join(map(str, message.sequences))}"
    return name
