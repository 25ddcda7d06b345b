"""`/v1/files` and `/v1/batches`, as in OpenAI's API, over a `BatchRunner`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.core.errors import Cancelled, InvalidRequest, NotFound, QuotaExceeded, Unavailable
from baton.runtime.disk import storage_failed
from baton.runtime.ignored_fields import IgnoredFields
from baton.runtime.status import HttpProblem
from coordinator.api_keys import ApiKeys
from coordinator.batches.runner import CONTENT, Answer, BatchRunner
from coordinator.batches.store import BatchStore
from coordinator.http.body import BodyReader, check_declared
from coordinator.http.errors import json_response
from coordinator.http.generation import SLICE_BYTES
from coordinator.http.guard import CLIENT, IGNORED
from coordinator.http.openapi import MAX_BATCHES, MAX_FILES, add_route
from coordinator.openai.schema import BatchBody
from coordinator.openai.validation import parse
from coordinator.policy.quotas import Client

UPLOAD_IDLE_S, UPLOAD_S = 30.0, 3600.0
UPLOAD_GRACE_S, UPLOAD_BYTES_S = 60.0, 16 * 1024
"""An upload may wait for its client for UPLOAD_GRACE_S in total, and a second more for each UPLOAD_BYTES_S received."""
MAX_FIELDS = 4
MAX_UPLOADS, MAX_UPLOADS_OF_OWNER = 8, 2  # each may need disk space for the largest file
MAX_DOWNLOADS, MAX_DOWNLOADS_OF_OWNER = 64, 16  # each has an open file besides its connection
MAX_BODY_BYTES = 64 * 1024  # of a new batch, with up to 10 KB of metadata; parsed on the event loop
_PIECE, _READ_BYTES = 1 << 20, 1 << 18
RETRY_S = 5.0
_MAX_NAME = 256
_FORM = frozenset({"file", "purpose"})
_OVERHEAD_BYTES = 1 << 16  # of a form, besides the file in it


class Slots:
    """Limits how many transfers run at the same time, so that slow clients leave room for others: `most` in total, and
    `of_owner` per owner if the client has an API key. `what` describes the transfers in messages. State: the running
    transfers of each owner."""

    def __init__(self, what: str, most: int, of_owner: int) -> None:
        self._what, self._most, self._of_owner = what, most, of_owner
        self.taken: Counter[str] = Counter()

    @contextmanager
    def one(self, client: Client) -> Iterator[None]:
        """Holds a slot for the duration of the `with` block.

        Raises:
            QuotaExceeded: the owner has reached its limit.
            Unavailable: all slots are in use.
        """
        owner = client.tenant
        if client.key and self.taken[owner] >= self._of_owner:
            raise QuotaExceeded(f"{self._of_owner} of your files are already {self._what}", retry_after_s=RETRY_S)
        if self.taken.total() >= self._most:
            raise Unavailable(f"{self._most} files are already {self._what}", retry_after_s=RETRY_S)
        self.taken[owner] += 1
        try:
            yield
        finally:
            self.taken[owner] -= 1
            if not self.taken[owner]:
                del self.taken[owner]


class BatchRoutes:
    """Complete state: the store and its runner, the maximum size of a file, and the running uploads and downloads.
    `report` is called with the endpoint and the names of ignored fields."""

    def __init__(
        self,
        store: BatchStore,
        app: FastAPI,
        reader: BodyReader,
        max_file_bytes: int,
        keys: ApiKeys,
        allowed_origins: Collection[str],
        report: Callable[[str, Collection[str]], None],
        strict_fields: bool,
    ) -> None:
        self.runner = BatchRunner(store, partial(ask, app), keys.named, strict_fields=strict_fields)
        self._report, self._strict = report, strict_fields
        self._origins = allowed_origins
        self._store, self._reader, self._max_file_bytes = store, reader, max_file_bytes
        self._uploads = Slots("being uploaded", MAX_UPLOADS, MAX_UPLOADS_OF_OWNER)
        self._downloads = Slots("being downloaded", MAX_DOWNLOADS, MAX_DOWNLOADS_OF_OWNER)
        add_route(app, "POST", "/v1/files", self.upload, "File")
        add_route(app, "GET", "/v1/files", self.files, "FileList")
        add_route(app, "GET", "/v1/files/{file_id}", self.file, "File")
        add_route(app, "DELETE", "/v1/files/{file_id}", self.delete, "FileDeleted")
        add_route(app, "GET", "/v1/files/{file_id}/content", self.content, "application/octet-stream")
        add_route(app, "POST", "/v1/batches", self.create, "Batch", BatchBody)
        add_route(app, "GET", "/v1/batches", self.batches, "BatchList")
        add_route(app, "GET", "/v1/batches/{batch_id}", self.batch, "Batch")
        add_route(app, "POST", "/v1/batches/{batch_id}/cancel", self.cancel, "Batch")

    async def upload(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise HttpProblem(
                415, "unsupported_media_type", "the content-type must be multipart/form-data", param="content-type"
            )
        check_origin(request, self._origins)
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() and len(declared) < 18 else 0
        if size > self._max_file_bytes + _OVERHEAD_BYTES:
            raise _too_large(self._max_file_bytes)
        with self._uploads.one(request.scope[CLIENT]):
            return await self._upload(request, size)

    async def _upload(self, request: Request, size: int) -> Response:
        owner = request.scope[CLIENT].tenant
        part = await self.runner.on_disk(self._store.new_part, owner, size)
        try:
            try:
                async with asyncio.timeout(UPLOAD_S):
                    filename, purpose, ignored = await self._receive(request, part)
            except TimeoutError:
                what = f"the upload took more than {UPLOAD_S:g} s"
                raise HttpProblem(408, "request_timeout", what, close=True) from None
            except OSError as error:
                raise self.runner.storage_failed(error) from None
            self._name_ignored(request, ignored)
            return json_response(await self.runner.on_disk(self._store.add_file, owner, part, filename, purpose))
        finally:
            part.unlink(missing_ok=True)

    def _name_ignored(self, request: Request, ignored: Collection[str]) -> None:
        request.scope[IGNORED] = ignored
        self._report(request.scope["path"], ignored)

    async def _receive(self, request: Request, part: Path) -> tuple[str, str, Collection[str]]:
        """Writes the file of a form to `part`; returns its name, its purpose and the form's ignored fields."""
        pieces = _bounded(request.stream(), self._max_file_bytes + _OVERHEAD_BYTES, self._max_file_bytes)
        head = _form_head(request.headers.get("content-type", ""))
        try:
            form = await MultiPartParser(head, pieces, max_files=1, max_fields=MAX_FIELDS).parse()
        except (MultiPartException, UnicodeError) as error:
            raise InvalidRequest(f"invalid multipart form: {str(error)[:200]}") from None
        except ClientDisconnect:
            raise Cancelled("the client disconnected while its file was read") from None
        try:
            file, purpose = form.get("file"), form.get("purpose")
            ignored = IgnoredFields(strict=self._strict)
            for name in form.keys() - _FORM:
                ignored.accept("", name, _FORM)
            if file is None or isinstance(file, str):
                raise InvalidRequest("'file' is required", code="missing_required_parameter", param="file")
            if purpose != "batch":
                raise InvalidRequest("'purpose' must be 'batch'", param="purpose")
            await asyncio.to_thread(_copy, file.file, part)
            if part.stat().st_size > self._max_file_bytes:
                raise _too_large(self._max_file_bytes)
            return (file.filename or "file")[:_MAX_NAME], purpose, ignored.names
        finally:
            await form.close()

    async def files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        return await self._list(
            request, lambda owner, limit, after: self._store.files(owner, limit, after, purpose), MAX_FILES
        )

    async def file(self, request: Request, file_id: str) -> Response:
        return await self._one(request, self._store.file, file_id)

    async def delete(self, request: Request, file_id: str) -> Response:
        await self.runner.on_disk(self._store.delete_file, request.scope[CLIENT].tenant, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request, file_id: str) -> Response:
        path = await self.runner.on_disk(self._store.content, request.scope[CLIENT].tenant, file_id)
        return FileAnswer(path, self._downloads.one(request.scope[CLIENT]))

    async def create(self, request: Request) -> Response:
        check_declared(request, MAX_BODY_BYTES)
        given = await self._reader.read(request)
        if len(given) > MAX_BODY_BYTES:
            raise HttpProblem(413, "request_too_large", f"the body may have at most {MAX_BODY_BYTES} bytes")
        body = parse(BatchBody, given, strict=self._strict)
        self._name_ignored(request, body.ignored)
        client: Client = request.scope[CLIENT]
        wanted = (client.tenant, client.key, body.endpoint, body.input_file_id, body.metadata or {})
        batch = await self.runner.on_disk(self._store.add_batch, *wanted)
        self.runner.add(batch)
        return json_response(batch)

    async def batches(self, request: Request) -> Response:
        return await self._list(request, self._store.batches, MAX_BATCHES)

    async def batch(self, request: Request, batch_id: str) -> Response:
        return await self._one(request, self._store.batch, batch_id)

    async def cancel(self, request: Request, batch_id: str) -> Response:
        answer = await self._one(request, self._store.cancel, batch_id)
        self.runner.wake()
        return answer

    async def _one(self, request: Request, find: Callable[[str, str], dict[str, Any]], name: str) -> Response:
        return json_response(await self.runner.on_disk(find, request.scope[CLIENT].tenant, name))

    async def _list(
        self, request: Request, find: Callable[[str, int, str | None], list[dict[str, Any]]], most: int
    ) -> Response:
        limit = limit_of(request, most)
        after = request.query_params.get("after")
        found = await self.runner.on_disk(find, request.scope[CLIENT].tenant, limit + 1, after)
        shown = found[:limit]
        ids = [each["id"] for each in shown] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1]}
        return json_response({"object": "list", "data": shown, **ends, "has_more": len(found) > limit})


def limit_of(request: Request, most: int) -> int:
    """Returns how many entries of a list the client requests. Raises InvalidRequest unless it is a number from 1 to
    `most`."""
    text = request.query_params.get("limit", "100")
    if not (text.isascii() and text.isdigit() and 0 < (limit := int(text[:9])) <= most):
        raise InvalidRequest(f"limit must be a number from 1 to {most}", param="limit")
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


class FileAnswer(Response):
    """The content of a file; holds `slot` while it is sent."""

    def __init__(self, path: Path, slot: AbstractContextManager[None]) -> None:
        super().__init__()
        self._path, self._slot = path, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slot:
            await self._give(send)

    async def _give(self, send: Send) -> None:
        try:
            file = await asyncio.to_thread(self._path.open, "rb")
        except FileNotFoundError:  # deleted since it was looked up
            raise NotFound("there is no such file", code="file_not_found", param="file_id") from None
        except OSError as error:
            raise storage_failed(CONTENT, error) from None
        with file:
            size = self._path.stat().st_size
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            left = size
            while left and (piece := await asyncio.to_thread(file.read, min(left, _READ_BYTES))):
                left -= len(piece)
                for at in range(0, len(piece), SLICE_BYTES):  # the connection buffers what its client has not read
                    body = piece[at : at + SLICE_BYTES]
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ask(app: FastAPI, path: str, body: bytes, client: Client) -> Answer:
    """Sends one request to a route of `app` without a socket, as if it came from `client`."""
    request_id = f"batch-{uuid4().hex}"
    headers = {"host": "batch", "content-type": "application/json", "x-request-id": request_id}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        CLIENT: client,
    }
    sent, pieces, status, received = False, list[bytes](), 500, dict[bytes, bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # this client never disconnects; the task that waits for it is cancelled
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, received
        if message["type"] == "http.response.start":
            status, received = message["status"], dict(message.get("headers", ()))
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    retry_after = received.get(b"retry-after", b"0").decode("latin-1")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    ignored = received.get(b"x-ignored-fields", b"").decode("latin-1")
    return Answer(status, request_id, b"".join(pieces), retry_after_s, ignored)


async def _bounded(pieces: AsyncIterator[bytes], most: int, shown: int) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of a body. Raises HttpProblem if it has over `most` bytes, a piece takes over UPLOAD_IDLE_S, or
    the body is slower than UPLOAD_BYTES_S on average; the time that the disk takes does not count."""
    size, waited_s, clock = 0, 0.0, asyncio.get_running_loop().time
    while True:
        left_s, asked_at = UPLOAD_GRACE_S + size / UPLOAD_BYTES_S - waited_s, clock()
        try:
            async with asyncio.timeout(min(UPLOAD_IDLE_S, left_s)):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError:
            what = f"no data of the file arrived for {UPLOAD_IDLE_S:g} s"
            if left_s < UPLOAD_IDLE_S:
                what = f"the file arrived at less than {UPLOAD_BYTES_S} bytes per second"
            raise HttpProblem(408, "request_timeout", what, close=True) from None
        size, waited_s = size + len(piece), waited_s + clock() - asked_at
        if size > most:
            raise _too_large(shown)
        yield piece


def _form_head(kind: str) -> Headers:
    """Returns the header for the form parser, with the boundary alone: given another charset than UTF-8, the parser
    would decode names and fields with it on the event loop, with some charsets in quadratic time.

    Raises:
        InvalidRequest: the content-type names another charset.
    """
    _, options = parse_options_header(kind)
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise InvalidRequest("the charset of a form must be utf-8", param="content-type")
    made = b"multipart/form-data"
    if (boundary := options.get(b"boundary")) is not None:
        made += b'; boundary="%b"' % boundary.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return Headers(raw=[(b"content-type", made)])


def _copy(source: Any, target: Path) -> None:
    with target.open("wb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)


def _too_large(most: int) -> HttpProblem:
    return HttpProblem(413, "request_too_large", f"a file may have at most {most} bytes", param="file", close=True)
