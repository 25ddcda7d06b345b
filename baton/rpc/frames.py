"""Frames: values between the ranks of one worker, as msgpack on a byte stream. The only place of msgpack.

A frame is 4 bytes of length, 1 of version, 1 of kind, then a dataclass as msgspec writes it: a map of its fields.
Reading is strict: another version, an unknown kind, a length over the cap, bytes left over, a field that is missing or
of the wrong type end the connection (FrameError), and nothing is built from what does not fit its annotation.

To add a kind: a frozen dataclass of int, float, bool, str, bytes, tuples, optionals and such dataclasses, and its
number in KINDS. Numbers are never used again for something else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from msgspec.msgpack import Decoder, Encoder

from baton.core.edge_orders import (
    AbortEdge,
    CloseEdge,
    DropEdge,
    EdgeBegun,
    EdgeDone,
    FillEdge,
    OpenEdge,
    SendEdge,
    TakeEdge,
)
from baton.core.errors import BatonError
from baton.core.step import StepPlan

VERSION = 7
MAX_FRAME_BYTES = 32 << 20
_HEAD = struct.Struct(">IBB")
_BODY_OFFSET = 2  # version and kind count as part of the length


class FrameError(BatonError):
    code = "bad_frame"


@dataclass(frozen=True, slots=True)
class Hello:
    """A follower's first frame: the job's token proves that it belongs here."""

    token: str
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The leader has drained; followers end well."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The sender ends because of this."""

    message: str


KINDS: dict[int, type[Any]] = {
    1: Hello,
    2: Heartbeat,
    3: Stop,
    4: Failed,
    5: StepPlan,
    6: OpenEdge,
    7: FillEdge,
    8: SendEdge,
    9: TakeEdge,
    10: AbortEdge,
    11: CloseEdge,
    12: EdgeBegun,
    13: EdgeDone,
    14: DropEdge,  # 15 is used up
}
_NUMBERS = {cls: number for number, cls in KINDS.items()}
_DECODERS = {number: Decoder(cls) for number, cls in KINDS.items()}
_ENCODER = Encoder()


def encode(frame: object) -> bytes:
    """One frame. Raises FrameError for a value of no known kind, or one that is too long."""
    kind = _NUMBERS.get(type(frame))
    if kind is None:
        raise FrameError(f"{type(frame).__name__} is not a kind of frame")
    try:
        body = _ENCODER.encode(frame)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"{type(frame).__name__}: {error}") from None
    if len(body) + _BODY_OFFSET > MAX_FRAME_BYTES:
        raise FrameError(f"{type(frame).__name__} of {len(body)} bytes, more than {MAX_FRAME_BYTES}")
    return _HEAD.pack(len(body) + _BODY_OFFSET, VERSION, kind) + body


class FrameReader:
    """Cuts a byte stream into frames of at most `max_bytes`. After an error it is of no further use."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Any]:
        """Takes the next bytes and returns the frames they complete. Raises FrameError."""
        self._buffer += data
        frames: list[Any] = []
        while len(self._buffer) >= _HEAD.size:
            length, version, kind = _HEAD.unpack_from(self._buffer)
            if not _BODY_OFFSET <= length <= self._max_bytes:
                raise FrameError(f"frame of {length} bytes, more than {self._max_bytes} or too few")
            if version != VERSION:
                raise FrameError(f"frame of version {version}, not {VERSION}")
            if kind not in KINDS:
                raise FrameError(f"frame of unknown kind {kind}")
            end = _HEAD.size + length - _BODY_OFFSET
            if len(self._buffer) < end:
                break
            frames.append(_decode(kind, bytes(self._buffer[_HEAD.size : end])))
            del self._buffer[:end]
        return frames


def _decode(kind: int, body: bytes) -> Any:
    try:
        return _DECODERS[kind].decode(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{KINDS[kind].__name__}: {str(error)[:200]}") from None
