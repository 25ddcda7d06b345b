"""Requests parsed in the method that they are for: of bytes that are no message grpc itself would make UNKNOWN and a
traceback in the log."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from baton.core.errors import InvalidRequest

_Message = TypeVar("_Message", bound=Message)


def parsed(kind: type[_Message], content: bytes) -> _Message:
    """Raises InvalidRequest for bytes that are no message of this type."""
    try:
        return kind.FromString(content)
    except DecodeError as e:
        what = f"the request is not a message of its type: {str(e)[:200]}"
        raise InvalidRequest(what, param="request") from None
