"""The checks of every request before routing, as plain ASGI middleware: size of the head, Host, API key and request id.

The server's protocol (server.py) refuses an endless head while it is read; the checks here need the complete head, so
that any server in front of the app gives the same answers. The room in the queue is checked here too, because more
requests may be refused for that than are served: a refusal here costs half of one behind the router.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Container
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.core.codes import ErrorCode
from baton.core.errors import Unauthenticated
from baton.runtime import batches_access
from baton.runtime.ignored_fields import as_header
from baton.runtime.status import HttpProblem
from coordinator.api_keys import MAX_PRIORITY, ApiKeys
from coordinator.http.errors import REQUEST_ID, error_response, is_for_anthropic
from coordinator.http.server import RECEIVED
from coordinator.policy.quotas import Client

MAX_HEADERS = 100
MAX_HEADER_BYTES = 8 * 1024
MAX_HEAD_BYTES = 16 * 1024
MAX_TARGET_BYTES = 8 * 1024
MAX_ID_CHARS = 128
OPEN_PATHS = ("/", "/live", "/health", "/ready", "/v2/health/live", "/v2/health/ready")
"""The page, which has no data of its own, and the health checks."""
CLIENT = "baton.client"
"""The scope key of the client."""
IGNORED = "baton.ignored"
"""The scope key under which a route stores the names of the fields that it ignores, for the header."""

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")
"""Names that no public DNS server resolves."""
_HOST = re.compile(rb"[A-Za-z0-9._~-]+(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
_ID = re.compile(rb"[!-~]{1,%d}" % MAX_ID_CHARS)


class Guard:
    """Refuses bad heads and clients without a key, sets the id of each request and the `x-request-id` of each answer
    (for Anthropic's clients also `request-id`), answers HEAD like GET but without a body, and lets no exception
    escape."""

    def __init__(
        self,
        app: ASGIApp,
        answered: Callable[[int, float], None] = lambda status, seconds: None,
        keys: ApiKeys | None = None,
        names: Names | None = None,
        batches_key: str | None = None,
        check_room: Callable[[Scope], None] = lambda scope: None,
        queued_paths: Container[str] = (),
    ) -> None:
        """`check_room` refuses a request, by its head, that would have no room in the queue; it is called for a POST to
        one of `queued_paths`."""
        self._app, self._answered, self._keys, self._names = app, answered, keys or ApiKeys(), names
        self._batches_key = batches_key
        self._check_room, self._queued_paths = check_room, queued_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head_only = scope["method"] == "HEAD"
        if head_only:
            scope = {**scope, "method": "GET"}  # a copy: the server has to see that no body follows
        given = [value for name, value in scope["headers"] if name == b"x-request-id"]
        named = len(given) == 1 and _ID.fullmatch(given[0]) is not None
        request_id = given[0] if named else b"req-" + uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode("ascii")
        started, received = False, scope.get(RECEIVED, time.monotonic())

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._answered(message["status"], time.monotonic() - received)
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                if is_for_anthropic(scope):
                    message["headers"].append((b"request-id", request_id))
                if names := scope.get(IGNORED):
                    message["headers"].append((b"x-ignored-fields", as_header(names).encode("ascii")))
            elif head_only:
                message = {**message, "body": b""}
            await send(message)

        try:
            host = check_head(scope)
            if self._names is not None and not self._names.known(host):
                raise HttpProblem(
                    403,
                    "host_not_allowed",
                    "without API keys, a server on loopback accepts only local host names; --allowed-origins adds"
                    " others, except for operators",
                    param="host",
                )
            if scope["path"] not in OPEN_PATHS:
                scope[CLIENT] = self._client(Headers(scope=scope))
            if given and not named:
                raise HttpProblem(
                    400,
                    ErrorCode.INVALID_VALUE,
                    f"x-request-id must be 1 to {MAX_ID_CHARS} printable ASCII characters without spaces",
                    param="x-request-id",
                )
            if scope["path"] in self._queued_paths and scope["method"] == "POST":
                self._check_room(scope)
            await self._app(scope, receive, tagged)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            response = error_response(error, scope)
            if not started:
                await response(scope, receive, tagged)

    def _client(self, headers: Headers) -> Client:
        """Returns the client of a request: of a line of a batch, the key that created the batch, at the lowest
        priority. Raises Unauthenticated."""
        if self._batches_key is None or batches_access.HEADER not in headers:
            return self._keys.client(_authorization(headers))
        client = self._keys.named(batches_access.owner_of(headers, self._batches_key).key)
        if client is None:
            message = "the API key that created the batch no longer exists"
            raise Unauthenticated(message, code=batches_access.KEY_REMOVED)
        return replace(client, priority=MAX_PRIORITY)


def _authorization(headers: Headers) -> str:
    """Returns the Authorization header, or one made of Anthropic's `x-api-key`; empty if there is not exactly one."""
    for name, scheme in (("authorization", ""), ("x-api-key", "Bearer ")):
        if sent := headers.getlist(name):
            return scheme + sent[0] if len(sent) == 1 else ""
    return ""


class Names:
    """The Host names that a server on loopback accepts. A web page may resolve its own name to this machine's address
    (DNS rebinding) and then has, for the browser, the server's origin; but the Host header still contains the page's
    name."""

    def __init__(self, allowed_origins: Collection[str]) -> None:
        self._any = "*" in allowed_origins
        own = {urlsplit(origin).hostname or "" for origin in allowed_origins}
        self._known = {name.lower() for name in (*own, socket.gethostname())}

    def known(self, host: str) -> bool:
        """Returns whether `host` is accepted: a Host header, with or without a port, or empty if there is none."""
        name = re.sub(r":\d*$", "", host.lower()).strip("[]").removesuffix(".")
        if self._any or "." not in name or name in self._known or name.endswith(_LOCAL_SUFFIXES):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def check_head(scope: Scope) -> str:
    """Checks the head; returns the Host header, empty if there is none.

    Raises:
        HttpProblem: the head is too large, or its Host header is repeated, malformed, or missing (except in HTTP/1.0).
    """
    headers = scope["headers"]
    sizes = [len(name) + len(value) + 4 for name, value in headers]
    if len(headers) > MAX_HEADERS or sum(sizes) > MAX_HEAD_BYTES or max(sizes, default=0) > MAX_HEADER_BYTES:
        raise HttpProblem(
            431,
            "headers_too_large",
            f"at most {MAX_HEADERS} headers, {MAX_HEADER_BYTES} bytes each, {MAX_HEAD_BYTES} together",
            close=True,
        )
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > MAX_TARGET_BYTES:
        message = f"the request line may have at most {MAX_TARGET_BYTES} bytes"
        raise HttpProblem(414, "uri_too_long", message, close=True)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and scope.get("http_version") != "1.0"):
        raise HttpProblem(400, "invalid_host", "exactly one Host header is required", param="host", close=True)
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise HttpProblem(400, "invalid_host", "the Host header is not a valid host", param="host", close=True)
    return hosts[0].decode("ascii") if hosts else ""
