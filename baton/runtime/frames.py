"""Frames: values between the processes of one worker, as msgpack on a byte stream. The only user of msgpack.

A frame is 4 bytes of length, 1 of version, 1 of kind, then the fields of a dataclass as a msgpack array; nested
dataclasses are arrays too. Reading is strict: another version, an unknown kind, a length out of bounds, trailing bytes
or a field of the wrong type end the connection (FrameError); only values that fit their annotation are accepted.

To add a kind: define a frozen dataclass of int, float, bool, str, bytes, tuples, optionals and such dataclasses, and
add its number to KINDS. Numbers are never reused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

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
from baton.core.plan_tables import ShortPlan

VERSION = 8
MAX_FRAME_BYTES = 32 << 20
_HEAD = struct.Struct(">IBB")
_BODY_OFFSET = 2  # version and kind count as part of the length


class FrameError(BatonError):
    code = "bad_frame"


@dataclass(frozen=True, slots=True)
class Hello:
    """A follower's first frame: the job's token proves that it belongs to this worker."""

    token: str
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    number: int


@dataclass(frozen=True, slots=True)
class RankStop:
    """The leader has drained; followers exit normally."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The sender exits because of this error."""

    message: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The leader exits because it lost another rank."""

    message: str


@dataclass(frozen=True, slots=True)
class RankLeave:
    """A follower received SIGTERM: the leader is to drain the worker."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Order `number`: load a LoRA adapter (baton.runtime.adapters)."""

    number: int
    digest: str
    path: str
    max_rank: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """A follower's answer to LoadAdapter; `error` is empty if it has the adapter."""

    number: int
    error: str


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Drop a LoRA adapter, between the plans before and after this frame."""

    digest: str


READY = b"ready"
"""What the process that starts the others sends first, if it could load the tokenizer; else it sends the reason."""


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Compute the masks after an output: the first `kept` tokens of the output that this automaton consumed last, then
    `tokens`; and after each of `drafts`. `ends` are allowed where the output may end. `grammar` is set with the first
    request for an automaton, and after an error. The process is killed after `cpu_s` of processor time for this
    request. Automata in `forgotten` are freed first."""

    automaton: int
    grammar: str
    kept: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    ends: tuple[int, ...]
    cpu_s: float
    forgotten: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MasksComputed:
    """Masks, one bit per token, lowest first; None from the first disallowed draft token on. Or an error:
    `exceeds_limit` if the grammar exceeds a limit of ours. `cpu_s` is the processor time used."""

    masks: tuple[bytes | None, ...]
    cpu_s: float
    error: str = ""
    exceeds_limit: bool = False


KINDS: dict[int, type[Any]] = {
    1: Hello,
    2: RankHeartbeat,
    3: RankStop,
    4: Failed,  # 5 was used and must not be reused
    6: OpenEdge,
    7: FillEdge,
    8: SendEdge,
    9: TakeEdge,
    10: AbortEdge,
    11: CloseEdge,
    12: EdgeBegun,
    13: EdgeDone,
    14: DropEdge,  # 15 was used and must not be reused
    16: MaskRequest,
    17: MasksComputed,
    18: RankLeave,
    19: Lost,
    20: LoadAdapter,
    21: AdapterLoaded,
    22: DropAdapter,
    23: ShortPlan,
}


def encode(frame: object) -> bytes:
    """Returns one frame. Raises FrameError for a value of no known kind, or one that is too long."""
    kind = next((number for number, cls in KINDS.items() if type(frame) is cls), None)
    if kind is None:
        raise FrameError(f"{type(frame).__name__} is not a kind of frame")
    try:
        body: bytes = msgpack.packb(_values(frame), default=_values)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"{type(frame).__name__}: {error}") from None
    if len(body) + _BODY_OFFSET > MAX_FRAME_BYTES:
        raise FrameError(f"{type(frame).__name__} of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _HEAD.pack(len(body) + _BODY_OFFSET, VERSION, kind) + body


class FrameReader:
    """Cuts a byte stream into frames of at most `max_bytes`. It must not be used after an error."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Any]:
        """Appends the next bytes and returns the frames that they complete. Raises FrameError."""
        self._buffer += data
        frames: list[Any] = []
        while len(self._buffer) >= _HEAD.size:
            length, version, kind = _HEAD.unpack_from(self._buffer)
            if not _BODY_OFFSET <= length <= self._max_bytes:
                raise FrameError(f"frame of {length} bytes is too short or exceeds {self._max_bytes}")
            if version != VERSION:
                raise FrameError(f"frame version {version}, expected {VERSION}")
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
        # unpackb creates an Unpacker for this message alone; it refuses trailing bytes.
        values = msgpack.unpackb(
            body, use_list=False, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0, max_array_len=len(body)
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"{KINDS[kind].__name__}: not msgpack: {str(error)[:100]}") from None
    return _reader_of(kind)(values)


def _values(value: Any) -> tuple[Any, ...]:
    """Returns the fields of a dataclass; msgpack calls it for nested dataclasses."""
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot be encoded in a frame")
    return tuple(getattr(value, f.name) for f in fields(value))


@cache  # not all at import: a process reads a few kinds
def _reader_of(kind: int) -> Callable[[Any], Any]:
    return _reader(KINDS[kind])


def _reader(kind: Any) -> Callable[[Any], Any]:
    """Returns a function that turns msgpack's output into a value of the annotation `kind`, or raises FrameError."""
    if kind in (int, bool, str, bytes):
        return lambda value: value if type(value) is kind else _refuse(kind, value)
    if kind is float:
        return lambda value: float(value) if type(value) in (float, int) else _refuse(kind, value)
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        read = _reader(inner)
        return lambda value: None if value is None else read(value)
    if get_origin(kind) is tuple and arguments[-1:] == (Ellipsis,):
        return _tuple_reader(arguments[0])
    hints = get_type_hints(kind)
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else list(kind._fields)
    readers = [_reader(hints[name]) for name in names]

    def read_fields(value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(readers):
            return _refuse(kind, value)
        return kind(*[read(item) for read, item in zip(readers, value, strict=True)])

    return read_fields


def _tuple_reader(kind: Any) -> Callable[[Any], Any]:
    read = _reader(kind)

    def read_items(value: Any) -> Any:
        if type(value) is not tuple:
            return _refuse(tuple, value)
        if kind is int and set(map(type, value)) <= {int}:  # token and block ids: the bulk of every plan
            return value
        return tuple(read(item) for item in value)

    return read_items


def _refuse(kind: Any, value: Any) -> Any:
    raise FrameError(f"{type(value).__name__} where {getattr(kind, '__name__', kind)} is expected")
