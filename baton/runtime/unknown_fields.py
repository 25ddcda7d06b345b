"""Fields of a protobuf message whose numbers this version does not define: a newer client may send them. The parser
keeps them, but has neither their names nor their types."""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

MAX_BYTES = 16 * 1024
"""Unknown fields with more bytes are not listed: a message could have half a million, which take 0.2 s to list."""


def unknown_fields(message: Message) -> frozenset[str]:
    """Returns the paths of unknown fields, whose last part is the field's number (`sampling.40`); `...` stands for
    those that are too many to list."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    excess = message.ByteSize() - known.ByteSize()
    if excess > MAX_BYTES:
        return frozenset({"..."})
    return frozenset(_numbers(message, "")) if excess else frozenset()


def _numbers(message: Message, place: str) -> set[str]:
    numbers = {f"{place}{field.field_number}" for field in UnknownFieldSet(message)}  # type: ignore[attr-defined]
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else (value,):
                numbers |= _numbers(each, f"{place}{field.name}.")
    return numbers
