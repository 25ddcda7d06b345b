"""Reads the request of calls that send one message: within a time limit, and refusing bytes that do not parse.

gRPC itself waits without limit for the rest of a message, keeping what has arrived, and turns invalid bytes into
UNKNOWN and a logged traceback. So the server handles such calls as streams of one message; the wire format is the same.

Fields of a protobuf message whose numbers this version does not define: a newer client may send them. The parser
keeps them, but has neither their names nor their types.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.core.errors import InvalidRequest

RECEIVE_S = 30.0
MAX_ARRIVING = 256
"""Of a server, over all connections: one more call ends the oldest, since a message arrives quickly or never."""
_Message = TypeVar("_Message", bound=Message)
Method = Callable[[Any, grpc.aio.ServicerContext], Any]


class FirstMessage(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Intercepts every method of a server whose calls send one message. Its state: for each call whose message is
    arriving, the future that ends it, oldest first."""

    def __init__(self) -> None:
        self._arriving: dict[asyncio.Future[None], None] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, handler.unary_stream), *codecs)
        return grpc.stream_unary_rpc_method_handler(partial(self._unary, handler.unary_unary), *codecs)

    # Neither keeps the message in a variable: a refused call must free it (coordinator.grpc.service).

    async def _unary(self, method: Method, _: object, context: grpc.aio.ServicerContext) -> Any:
        return await method(await self._read(context), context)

    async def _stream(self, method: Method, _: object, context: grpc.aio.ServicerContext) -> None:
        answers = method(await self._read(context), context)
        if inspect.isasyncgen(answers):
            async for answer in answers:
                await context.write(answer)
        else:
            await answers

    async def _read(self, context: grpc.aio.ServicerContext) -> Any:
        """Returns the message; ends the call when none arrives within `RECEIVE_S`."""
        cut = asyncio.get_running_loop().create_future()
        self._arriving[cut] = None
        if len(self._arriving) > MAX_ARRIVING:
            oldest = next(iter(self._arriving))
            del self._arriving[oldest]
            oldest.set_result(None)
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait((reading, cut), timeout=RECEIVE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._arriving.pop(cut, None)
        if not reading.done():  # not cancelled here: gRPC has begun to read, and stops with the call
            reason = f"the request message did not arrive within {RECEIVE_S:g} s"
            if cut.done():
                reason = f"its request message was the oldest of {MAX_ARRIVING + 1} incomplete ones"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"call ended: {reason}")
        if reading.exception() is not None or reading.result() is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no valid request message")
        return reading.result()


def parsed(kind: type[_Message], content: bytes) -> _Message:
    """Parses a request in the method that handles it. Raises InvalidRequest for bytes that are not a message of this
    type."""
    try:
        return kind.FromString(content)
    except DecodeError as e:
        message = f"invalid request message: {str(e)[:200]}"
        raise InvalidRequest(message, param="request") from None


MAX_UNKNOWN_BYTES = 16 * 1024
"""Unknown fields with more bytes are not listed: a message could have half a million, which take 0.2 s to list."""


def unknown_fields(message: Message) -> frozenset[str]:
    """Returns the paths of unknown fields, whose last part is the field's number (`sampling.40`); `...` stands for
    those that are too many to list."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    excess = message.ByteSize() - known.ByteSize()
    if excess > MAX_UNKNOWN_BYTES:
        return frozenset({"..."})
    return frozenset(_numbers(message, "")) if excess else frozenset()


def _numbers(message: Message, place: str) -> set[str]:
    numbers = {f"{place}{field.field_number}" for field in UnknownFieldSet(message)}  # type: ignore[attr-defined]
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else (value,):
                numbers |= _numbers(each, f"{place}{field.name}.")
    return numbers
