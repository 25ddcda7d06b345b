"""`/v1/files` and `/v1/batches`: each request is checked here, and answered by the batches process. Its figures are
part of `/metrics`.

The client's tenant and API key go with it (baton/runtime/batches_access.py). The form of an upload and the content of a
file are passed on as they arrive, at the pace of the slower side.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from baton.core.errors import Cancelled, InvalidRequest, Unavailable
from baton.runtime.batches_access import Owner, headers_for
from baton.runtime.disk import LIMIT_S
from baton.runtime.status import HttpProblem
from coordinator.api_keys import ApiKeys
from coordinator.http.body import BodyReader, check_declared
from coordinator.http.generation import SLICE_BYTES
from coordinator.http.guard import CLIENT, IGNORED
from coordinator.http.openapi import MAX_BATCHES, MAX_FILES, add_route
from coordinator.openai.schema import BatchBody
from coordinator.openai.validation import parse
from coordinator.policy.quotas import Client

if TYPE_CHECKING:
    import aiohttp

MAX_BODY_BYTES = 64 * 1024  # of a new batch, with up to 10 KB of metadata; parsed on the event loop
CONNECT_S = 2.0
ANSWER_S = LIMIT_S + 30.0
"""The longest wait for the batches process: its own limit for the disk, and some more."""
FIGURES_S = 1.0
"""For its figures, for which a scrape of `/metrics` waits."""
MAX_CONNECTIONS = 512
"""To the batches process, which limits how many of them may be uploads and downloads."""
KEPT = ("content-type", "content-length", "retry-after", "x-should-retry")
"""The headers of an answer that go to the client."""
BUFFER_BYTES = 64 * 1024
"""Of the kernel, for each connection: by default it would hold megabytes for a client that reads slowly."""


class BatchesClient:
    """State: the connections to the batches process at `address`. `key` is that of `access_key`."""

    def __init__(self, address: str, key: str) -> None:
        self.url, self.key = f"http://{address}", key
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def session(self) -> aiohttp.ClientSession:
        """Returns the session, made by the first request: importing the library takes 0.2 s of a start."""
        if self._session is not None:
            return self._session
        await asyncio.to_thread(importlib.import_module, "aiohttp")
        import aiohttp

        if self._session is None:  # two first requests may have waited for the import
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, socket_factory=_small_socket),
                timeout=aiohttp.ClientTimeout(connect=ANSWER_S, sock_connect=CONNECT_S, sock_read=ANSWER_S),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "content-type"),
            )
        return self._session

    async def figures(self) -> dict[str, Any] | None:
        """Returns the figures of the process (`BatchRunner.figures`); None if it sends none within FIGURES_S."""
        session = await self.session()
        import aiohttp

        try:
            async with (
                asyncio.timeout(FIGURES_S),
                session.get(f"{self.url}/figures", headers=headers_for(Owner(), self.key)) as answer,
            ):
                figures: dict[str, Any] | None = orjson.loads(await answer.read()) if answer.status == 200 else None
                return figures
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


class BatchesProxy:
    """`report` is called with the endpoint and the names of ignored fields."""

    def __init__(
        self,
        app: Starlette,
        client: BatchesClient,
        keys: ApiKeys,
        reader: BodyReader,
        allowed_origins: Collection[str],
        report: Callable[[str, Collection[str]], None],
        strict_fields: bool,
    ) -> None:
        self._client, self._reader, self._origins = client, reader, allowed_origins
        self._report, self._strict, self._several = report, strict_fields, keys.has_several_tenants()
        add_route(app, "POST", "/v1/files", self.upload, "File")
        add_route(app, "GET", "/v1/files", self.files, "FileList")
        add_route(app, "GET", "/v1/files/{file_id}", self.file, "File")
        add_route(app, "DELETE", "/v1/files/{file_id}", self.file, "FileDeleted")
        add_route(app, "GET", "/v1/files/{file_id}/content", self.content, "application/octet-stream")
        add_route(app, "POST", "/v1/batches", self.create, "Batch", BatchBody)
        add_route(app, "GET", "/v1/batches", self.batches, "BatchList")
        add_route(app, "GET", "/v1/batches/{batch_id}", self.batch, "Batch")
        add_route(app, "POST", "/v1/batches/{batch_id}/cancel", self.cancel, "Batch")

    async def upload(self, request: Request) -> Response:
        check_origin(request, self._origins)
        sent = {name: request.headers[name] for name in ("content-type", "content-length") if name in request.headers}
        return await self._forward(request, "/v1/files", body=_pieces(request), headers=sent)

    async def files(self, request: Request) -> Response:
        return await self._list(request, "/v1/files", MAX_FILES)

    async def file(self, request: Request, file_id: str) -> Response:
        return await self._forward(request, f"/v1/files/{quote(file_id, safe='')}")

    async def content(self, request: Request, file_id: str) -> Response:
        return await self._forward(request, f"/v1/files/{quote(file_id, safe='')}/content", stream=True)

    async def create(self, request: Request) -> Response:
        check_declared(request, MAX_BODY_BYTES)
        given = await self._reader.read(request)
        if len(given) > MAX_BODY_BYTES:
            raise HttpProblem(413, "request_too_large", f"the body may have at most {MAX_BODY_BYTES} bytes")
        body = parse(BatchBody, given, strict=self._strict)
        self._name_ignored(request, body.ignored)
        fields = {"endpoint": body.endpoint, "input_file_id": body.input_file_id, "metadata": body.metadata or {}}
        return await self._forward(request, "/v1/batches", body=orjson.dumps(fields))

    async def batches(self, request: Request) -> Response:
        return await self._list(request, "/v1/batches", MAX_BATCHES)

    async def batch(self, request: Request, batch_id: str) -> Response:
        return await self._forward(request, f"/v1/batches/{quote(batch_id, safe='')}")

    async def cancel(self, request: Request, batch_id: str) -> Response:
        return await self._forward(request, f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    async def _list(self, request: Request, path: str, max_items: int) -> Response:
        query = {"limit": str(limit_of(request, max_items))}
        query |= {name: request.query_params[name] for name in ("after", "purpose") if name in request.query_params}
        return await self._forward(request, path, query=query)

    async def _forward(
        self,
        request: Request,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: bytes | AsyncIterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
        stream: bool = False,
    ) -> Response:
        """Returns the answer of the batches process; with `stream`, its body is passed on while it arrives.

        Raises:
            Unavailable: the process cannot be reached, or does not answer.
            Cancelled: the client disconnected during its upload.
        """
        session = await self._client.session()
        import aiohttp
        from yarl import URL

        client: Client = request.scope[CLIENT]
        named = headers_for(Owner(client.tenant, client.key, self._several), self._client.key)
        url = URL(self._client.url + path, encoded=True).with_query(query)
        try:
            answer = await session.request(
                request.method, url, data=body, headers=named | (headers or {}), allow_redirects=False
            )
            if stream and answer.status == 200:
                return StreamingResponse(_content(answer), 200, _kept(answer))
            with closing(answer):  # and the connection: the upload may not have ended
                content = await answer.content.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error.__cause__, ClientDisconnect):
                raise Cancelled("the client disconnected while its file was read") from None
            message = "the process that serves files and batches does not respond; it may be restarting"
            raise Unavailable(message, code="batches_unavailable", retry_after_s=1) from None
        if given := answer.headers.get("x-ignored-fields"):
            self._name_ignored(request, given.split(", "))
        return Response(content, answer.status, _kept(answer))

    def _name_ignored(self, request: Request, ignored: Collection[str]) -> None:
        request.scope[IGNORED] = ignored
        self._report(request.scope["path"], ignored)


def limit_of(request: Request, max_items: int) -> int:
    """Returns how many entries of a list the client requests. Raises InvalidRequest unless it is a number from 1 to
    `max_items`."""
    text = request.query_params.get("limit", "100")
    if not (text.isascii() and text.isdigit() and 0 < (limit := int(text[:9])) <= max_items):
        raise InvalidRequest(f"limit must be a number from 1 to {max_items}", param="limit")
    return limit


def check_origin(request: Request, allowed: Collection[str]) -> None:
    """Refuses a form sent by a page of another origin: browsers send forms without a CORS preflight.

    Raises:
        HttpProblem: 403.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if origin.partition("//")[2] != request.headers.get("host"):
        raise HttpProblem(403, "origin_not_allowed", "pages of this origin may not upload files; see --allowed-origins")


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return sock


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in KEPT if name in answer.headers}


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yields the parts of a body that are not empty."""
    async for piece in request.stream():
        if piece:
            yield piece


async def _content(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields a body in small slices: the connection buffers what its client has not read."""
    with closing(answer):
        async for piece in answer.content.iter_chunked(SLICE_BYTES):
            yield piece
