"""The HTTP server of the batches process: `/v1/files` and `/v1/batches`, over a `BatchRunner`.

Only the coordinator calls it. It has checked the client's API key, the head of the request, the page of a list and the
body of a new batch, whose fields arrive as JSON; the forms of uploads are read here, straight from the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import orjson
from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from batches.runner import CONTENT, BatchRunner
from batches.store import BatchStore
from baton.core.errors import Cancelled, InvalidRequest, NotFound, QuotaExceeded, Unavailable
from baton.runtime import status
from baton.runtime.batches_access import Owner, owner_of
from baton.runtime.disk import storage_failed
from baton.runtime.ignored_fields import IgnoredFields, as_header
from baton.runtime.status import HttpProblem

log = logging.getLogger("baton.batches")
UPLOAD_IDLE_S, UPLOAD_S = 30.0, 3600.0
UPLOAD_GRACE_S, UPLOAD_BYTES_S = 60.0, 16 * 1024
"""An upload may wait for its client for UPLOAD_GRACE_S in total, and a second more for each UPLOAD_BYTES_S received."""
MAX_FIELDS = 4
MAX_UPLOADS, MAX_UPLOADS_OF_OWNER = 8, 2  # each may need disk space for the largest file
MAX_DOWNLOADS, MAX_DOWNLOADS_OF_OWNER = 64, 16  # each has an open file besides its connection
_PIECE, _READ_BYTES = 1 << 20, 1 << 18
RETRY_S = 5.0
_MAX_NAME = 256
_FORM = frozenset({"file", "purpose"})
_OVERHEAD_BYTES = 1 << 16  # of a form, besides the file in it


class Slots:
    """Limits how many transfers run at the same time, so that slow clients leave room for others: `limit` in total, and
    `of_owner` per tenant if the client has an API key. `activity` describes the transfers in messages."""

    def __init__(self, activity: str, limit: int, of_owner: int) -> None:
        self._activity, self._limit, self._of_owner = activity, limit, of_owner
        self.taken: Counter[str] = Counter()  # running transfers of each tenant

    @contextmanager
    def one(self, owner: Owner) -> Iterator[None]:
        """Holds a slot for the duration of the `with` block.

        Raises:
            QuotaExceeded: the owner has reached its limit.
            Unavailable: all slots are in use.
        """
        tenant = owner.tenant
        if owner.key and self.taken[tenant] >= self._of_owner:
            raise QuotaExceeded(f"{self._of_owner} of your files are already {self._activity}", retry_after_s=RETRY_S)
        if self.taken.total() >= self._limit:
            raise Unavailable(f"{self._limit} files are already {self._activity}", retry_after_s=RETRY_S)
        self.taken[tenant] += 1
        try:
            yield
        finally:
            self.taken[tenant] -= 1
            if not self.taken[tenant]:
                del self.taken[tenant]


class BatchRoutes:
    """`key` is that of `access_key`; `strict_fields` refuses unknown fields of forms."""

    def __init__(
        self, store: BatchStore, runner: BatchRunner, key: str, *, max_file_bytes: int, strict_fields: bool = False
    ) -> None:
        self._store, self._runner, self._key = store, runner, key
        self._max_file_bytes, self._strict = max_file_bytes, strict_fields
        self._uploads = Slots("being uploaded", MAX_UPLOADS, MAX_UPLOADS_OF_OWNER)
        self._downloads = Slots("being downloaded", MAX_DOWNLOADS, MAX_DOWNLOADS_OF_OWNER)
        self._routes = [
            self._route("POST", "/v1/files", self._upload),
            self._route("GET", "/v1/files", self._files),
            self._route("GET", "/v1/files/{file_id}", self._file),
            self._route("DELETE", "/v1/files/{file_id}", self._delete),
            self._route("GET", "/v1/files/{file_id}/content", self._content),
            self._route("POST", "/v1/batches", self._create),
            self._route("GET", "/v1/batches", self._batches),
            self._route("GET", "/v1/batches/{batch_id}", self._batch),
            self._route("POST", "/v1/batches/{batch_id}/cancel", self._cancel),
            self._route("GET", "/figures", self._figures),
        ]

    def app(self) -> Starlette:
        return Starlette(routes=self._routes)

    def _route(self, method: str, path: str, endpoint: Callable[[Request, Owner], Awaitable[Response]]) -> Route:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request, owner_of(request.headers, self._key))
            except Exception as error:
                return _error_response(error)

        return Route(path, answer, methods=[method])

    async def _upload(self, request: Request, owner: Owner) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise HttpProblem(
                415, "unsupported_media_type", "the content-type must be multipart/form-data", param="content-type"
            )
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() and len(declared) < 18 else 0
        if size > self._max_file_bytes + _OVERHEAD_BYTES:
            raise _too_large(self._max_file_bytes)
        with self._uploads.one(owner):
            return await self._upload_declared(request, owner, size)

    async def _upload_declared(self, request: Request, owner: Owner, size: int) -> Response:
        part = await self._runner.on_disk(self._store.new_part, owner, size)
        try:
            try:
                async with asyncio.timeout(UPLOAD_S):
                    filename, purpose, ignored = await self._receive(request, part)
            except TimeoutError:
                raise HttpProblem(408, "request_timeout", f"the upload took more than {UPLOAD_S:g} s") from None
            except OSError as error:
                raise self._runner.storage_failed(error) from None
            file = await self._runner.on_disk(self._store.add_file, owner, part, filename, purpose)
            return _json(file, {"x-ignored-fields": as_header(ignored)} if ignored else {})
        finally:
            part.unlink(missing_ok=True)

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

    async def _files(self, request: Request, owner: Owner) -> Response:
        purpose = request.query_params.get("purpose")
        return await self._list(request, lambda limit, after: self._store.files(owner.tenant, limit, after, purpose))

    async def _file(self, request: Request, owner: Owner) -> Response:
        return await self._one(self._store.file, owner, request.path_params["file_id"])

    async def _delete(self, request: Request, owner: Owner) -> Response:
        file_id = request.path_params["file_id"]
        await self._runner.on_disk(self._store.delete_file, owner.tenant, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request, owner: Owner) -> Response:
        path = await self._runner.on_disk(self._store.content, owner.tenant, request.path_params["file_id"])
        return FileAnswer(path, self._downloads.one(owner))

    async def _create(self, request: Request, owner: Owner) -> Response:
        body = orjson.loads(await request.body())
        fields = body["endpoint"], body["input_file_id"], body["metadata"]
        batch = await self._runner.on_disk(self._store.add_batch, owner, *fields)
        self._runner.add(batch)
        return _json(batch)

    async def _batches(self, request: Request, owner: Owner) -> Response:
        return await self._list(request, lambda limit, after: self._store.batches(owner.tenant, limit, after))

    async def _batch(self, request: Request, owner: Owner) -> Response:
        return await self._one(self._store.batch, owner, request.path_params["batch_id"])

    async def _figures(self, request: Request, owner: Owner) -> Response:
        return _json(await self._runner.figures())

    async def _cancel(self, request: Request, owner: Owner) -> Response:
        answer = await self._one(self._store.cancel, owner, request.path_params["batch_id"])
        self._runner.wake()
        return answer

    async def _one(self, find: Callable[[str, str], dict[str, Any]], owner: Owner, name: str) -> Response:
        return _json(await self._runner.on_disk(find, owner.tenant, name))

    async def _list(self, request: Request, find: Callable[[int, str | None], list[dict[str, Any]]]) -> Response:
        limit, after = int(request.query_params["limit"]), request.query_params.get("after")
        rows = await self._runner.on_disk(find, limit + 1, after)
        shown = rows[:limit]
        ids = [each["id"] for each in shown] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1]}
        return _json({"object": "list", "data": shown, **ends, "has_more": len(rows) > limit})


class FileAnswer(Response):
    """The content of a file; holds `slot` while it is sent."""

    def __init__(self, path: Path, slot: AbstractContextManager[None]) -> None:
        super().__init__()
        self._path, self._slot = path, slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._slot:
                await self._give(send)
        except (NotFound, QuotaExceeded, Unavailable) as error:  # before the first byte of the content
            await _error_response(error)(scope, receive, send)

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
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _bounded(pieces: AsyncIterator[bytes], limit: int, shown: int) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of a body. Raises HttpProblem if it has over `limit` bytes, a piece takes over UPLOAD_IDLE_S,
    or the body is slower than UPLOAD_BYTES_S on average; the time that the disk takes does not count."""
    size, waited_s, clock = 0, 0.0, asyncio.get_running_loop().time
    while True:
        left_s, asked_at = UPLOAD_GRACE_S + size / UPLOAD_BYTES_S - waited_s, clock()
        try:
            async with asyncio.timeout(min(UPLOAD_IDLE_S, left_s)):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError:
            reason = f"no data of the file arrived for {UPLOAD_IDLE_S:g} s"
            if left_s < UPLOAD_IDLE_S:
                reason = f"the file arrived at less than {UPLOAD_BYTES_S} bytes per second"
            raise HttpProblem(408, "request_timeout", reason) from None
        size, waited_s = size + len(piece), waited_s + clock() - asked_at
        if size > limit:
            raise _too_large(shown)
        yield piece


def _json(content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), headers=headers, media_type="application/json")


def _error_response(error: Exception) -> Response:
    """Returns the answer to any exception. Internal errors are logged, and their details are not sent."""
    if isinstance(error, HttpProblem):
        body = status.error_body(error.message, type="invalid_request_error", param=error.param, code=error.code)
        return Response(orjson.dumps(body), error.http, media_type="application/json")
    if status.row(error).hide:
        log.error("internal error: %s", type(error).__name__, exc_info=error)
    http, headers = status.http_status(error), status.http_headers(error)
    return Response(orjson.dumps(status.http_body(error)), http, headers, media_type="application/json")


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


def _too_large(max_bytes: int) -> HttpProblem:
    return HttpProblem(413, "request_too_large", f"a file may have at most {max_bytes} bytes", param="file")
