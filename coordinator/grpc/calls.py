"""How a call to the public gRPC API is answered and ended."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import Iterable

import grpc.aio
from google.protobuf.message import Message

from baton.core.errors import Cancelled
from baton.runtime import status
from coordinator.recent import SPACE
from coordinator.submission import SESSION

SEND_TIMEOUT_S = 30.0


async def write(context: grpc.aio.ServicerContext, message: Message) -> None:
    """Raises Cancelled if the client reads nothing for too long."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await context.write(message)
    except TimeoutError:
        raise Cancelled(f"the client read nothing for {SEND_TIMEOUT_S:g} s") from None


async def refuse(error: Exception, _: object, context: grpc.aio.ServicerContext) -> None:
    """Handles a refused call: its message is not read."""
    await abort(error, context)


async def abort(error: Exception, context: grpc.aio.ServicerContext) -> None:
    """Ends the call: `abort` raises. The exception and the call refer to each other, so everything reachable from its
    traceback and its causes would stay until a garbage collection. Callers drop their message first."""
    context.set_trailing_metadata((*(context.trailing_metadata() or ()), *status.grpc_trailing_metadata(error)))
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    await context.abort(status.grpc_code(error), status.public_message(error))


def internal_id(name: str) -> str:
    """Returns the id of a request inside: a client's own may be in use by another client, as over HTTP."""
    return f"{name.replace(' ', SPACE)}-{secrets.token_hex(4)}"


def sent_value(metadata: Iterable[tuple[str, str]] | None, name: str) -> str:
    """Returns the only value under a name; empty if there is none, or several."""
    sent = [value for key, value in metadata or () if key == name]
    return sent[0] if len(sent) == 1 else ""


def sent_with(context: grpc.aio.ServicerContext) -> tuple[str, str]:
    """Returns the traceparent and the session that a client sent with its call; empty without."""
    metadata = context.invocation_metadata()
    return sent_value(metadata, "traceparent"), sent_value(metadata, SESSION)
