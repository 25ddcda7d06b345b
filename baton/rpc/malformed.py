"""Bytes of a client that are no message of their type. Left to grpc they would be answered UNKNOWN and log a traceback;
with a deserializer of `parser` the method gets them as a value, and refuses them in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from baton.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Malformed:
    reason: str

    def refused(self) -> InvalidRequest:
        return InvalidRequest(f"the request is not a message of its type: {self.reason}", param="request")


def parser(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    """A deserializer of requests of one type."""

    def parse(content: bytes) -> Message | Malformed:
        try:
            return kind.FromString(content)
        except DecodeError as e:
            return Malformed(str(e)[:200])

    return parse
