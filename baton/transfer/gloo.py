"""An edge over Gloo: two ranks, TCP, CPU memory.

Measured facts on which this file relies (torch 2.13):
- a point-to-point work cannot be polled: `is_completed()` stays False until `wait()`; so an edge waits on a thread;
- a `wait` that times out closes the pair permanently, as does any error: the edge is dead then;
- a killed or closed peer is detected within 0.1 s, a stopped one only by the timeout; but an operation that has moved
  part of its bytes when the connection ends is never woken. So neither end waits for a payload: both wait for a small
  message that can only follow it (its receive has moved no bytes yet, and is woken);
- `ProcessGroup.abort` and `shutdown` do not free a blocked `wait`; shutting down its TCP connection does (`sockets`);
- a message longer than the posted receive ends the *process* (std::terminate on Gloo's thread) and a shorter one
  is not detected; so every payload is announced by a header of fixed size, and received only if it fits;
- its listener accepts every connection, which holds a descriptor until the edge ends, and an error of accepting ends
  the *process* (std::terminate): so it is neither closed nor shut down, but drops packets once the pair is connected;
- if a pair does not connect in time, Gloo frees it, but not the callback for its connection (pair.cc, listener.cc): a
  peer that dials later ends the process (SIGSEGV), as long as the device has its thread; so the device goes at once;
- messages with one tag arrive in the order in which they were sent. So a payload may be sent in sections, each followed
  by a small message of its own, and the receiver posts receives for all of them as soon as the header fits.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from baton.core.errors import HandoffError
from baton.transfer.edge import Arrived, EdgeSpec, Ready, cut_buffer
from baton.transfer.rendezvous import Meeting
from baton.transfer.sockets import Address, drop_new_connections, hang_up, listener_address

_HEADER = struct.Struct("<8sQQQQ")  # edge id, generation, operation number, payload bytes, sections
_WORD = struct.Struct("<Q")
_HEADER_TAG, _PAYLOAD_TAG, _DONE_TAG = 0, 1, 2
_MESSAGE_NOISE = re.compile(r"^\[[^\]]*\]\s*|\. This is typically.*")


@dataclass(slots=True)
class _Posted:
    """A launched operation and the buffer that it must keep alive."""

    buf: Tensor
    work: Any


class GlooEdge:
    """One end of an edge over Gloo; see `Edge` for the contract."""

    def __init__(self, spec: EdgeSpec) -> None:
        self.spec = spec
        self._group: Any = None
        self._mine: Address | None = None  # where this rank of the group listens
        self._theirs: Address | None = None  # where its peer listens
        self._meeting = Meeting(spec)
        self._dead = False
        self._operations = 0
        self._doing, self._since = "connect", 0.0  # for messages: the current call and its start (monotonic)
        self._id = xxhash.xxh3_64_digest(spec.prefix.encode())

    def connect(self) -> None:
        self._since = time.monotonic()
        gloo: Any = ProcessGroupGloo  # the stubs lack `_Options`
        with self._meeting.meet() as (store, deadline):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self.spec.bind_host)]
            options._threads = 1
            options._timeout = left
            try:
                self._group = gloo(store, self.spec.rank, 2, options)
            except RuntimeError:
                options._devices = []  # ends Gloo's thread, before anything else takes time
                raise
            self._mine = listener_address(store.get(f"0/{self.spec.rank}"))
            self._theirs = listener_address(store.get(f"0/{self.spec.peer_rank}"))
            # One header each way tests both directions; after it neither end needs the store's keys.
            for sender in (0, 1):
                if sender == self.spec.rank:
                    self._wait(self._post("send", self._header(0), _HEADER_TAG), deadline)
                else:
                    self._receive_header(0, deadline)
        drop_new_connections(self._mine)

    def send(self, buf: Tensor, timeout_s: float, ends: Sequence[int] = (), ready: Ready | None = None) -> None:
        sections = cut_buffer(self.spec, buf, ends)
        deadline = self._begin("send", buf, timeout_s)
        header, done = self._header(buf.numel(), len(sections)), torch.empty(1, dtype=torch.uint8)
        # All posted together: Gloo holds each message until the receiver requests it, so none can overrun its buffer.
        posted = [self._post("recv", done, _DONE_TAG), self._post("send", header, _HEADER_TAG)]
        for index, section in enumerate(sections):
            word = 0 if ready is None else int(ready(index))
            posted.append(self._post("send", section, _PAYLOAD_TAG))
            posted.append(self._post("send", _bytes(_WORD.pack(word)), _DONE_TAG))
        for operation in posted:  # the first confirms that all has arrived; the others have ended then
            self._wait(operation, deadline)

    def recv(
        self,
        buf: Tensor,
        timeout_s: float,
        on_posted: Callable[[], None] | None = None,
        ends: Sequence[int] = (),
        arrived: Arrived | None = None,
    ) -> None:
        sections = cut_buffer(self.spec, buf, ends)
        deadline = self._begin("recv", buf, timeout_s)
        self._receive_header(buf.numel(), deadline, on_posted, len(sections))
        posted = [
            (self._post("recv", section, _PAYLOAD_TAG), self._post("recv", _bytes(bytes(_WORD.size)), _DONE_TAG))
            for section in sections
        ]
        closing: _Posted | None = None
        for index, (payload, done) in enumerate(posted):
            self._wait(done, deadline)
            self._wait(payload, deadline)
            if index + 1 == len(posted):  # before `arrived`: the sender waits for it
                closing = self._post("send", done.buf[:1], _DONE_TAG)
            if arrived is not None:
                arrived(index, _WORD.unpack(bytes(done.buf.tolist()))[0])
        if closing is not None:
            self._wait(closing, deadline)

    def abort(self) -> None:
        self._meeting.abort()
        hang_up(self._theirs, self._mine)

    def close(self) -> None:
        self._dead = True
        hang_up(self._theirs, self._mine)  # now: a work in a traceback would keep the group and its sockets open
        self._group = None

    def _begin(self, name: str, buf: Tensor, timeout_s: float) -> float:
        """Starts the next operation; returns its deadline (monotonic)."""
        self._operations += 1
        self._doing, self._since = f"{name} of {buf.numel()} bytes", time.monotonic()
        return self._since + timeout_s

    def _post(self, name: str, buf: Tensor, tag: int) -> _Posted:
        """Launches one Gloo message. Raises HandoffError; the edge is dead then."""
        if self._dead or self._group is None or self._meeting.aborted:
            raise self.spec.error(f"{self._doing} on an edge that has ended")
        try:
            return _Posted(buf, getattr(self._group, name)([buf], self.spec.peer_rank, tag))
        except RuntimeError as e:
            raise self._failed(e) from e

    def _wait(self, posted: _Posted, deadline: float) -> None:
        """Waits for the operation until `deadline` (monotonic). Raises HandoffError; the edge is dead then."""
        try:
            posted.work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as e:
            raise self._failed(e) from e

    def _failed(self, e: RuntimeError) -> HandoffError:
        self._dead = True
        cause = "aborted" if self._meeting.aborted else _MESSAGE_NOISE.sub("", str(e).splitlines()[0])
        return self.spec.error(f"{self._doing} failed after {time.monotonic() - self._since:.2f} s: {cause}")

    def _header(self, size: int, sections: int = 0) -> Tensor:
        return _bytes(_HEADER.pack(self._id, self.spec.generation, self._operations, size, sections))

    def _receive_header(
        self, size: int, deadline: float, on_posted: Callable[[], None] | None = None, sections: int = 0
    ) -> None:
        header, expected = torch.empty(_HEADER.size, dtype=torch.uint8), self._header(size, sections)
        posted = self._post("recv", header, _HEADER_TAG)
        if on_posted is not None:
            on_posted()
        self._wait(posted, deadline)
        if not torch.equal(header, expected):
            self._dead = True
            theirs, mine = (_HEADER.unpack(bytes(h.tolist())) for h in (header, expected))
            names = ("edge", "generation", "operation", "bytes", "sections")
            field = next(n for n, a, b in zip(names, theirs, mine, strict=True) if a != b)
            index = names.index(field)
            raise self.spec.error(f"the sender's {field} is {theirs[index]!r}, expected {mine[index]!r}")


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
