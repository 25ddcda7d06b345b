"""Requests to an OpenAI-compatible server, in a closed loop (each of `concurrency` clients sends its next request when
its last one has ended) or an open loop (each request is sent when it is due, whether or not the server keeps up). An
arrival is timed when its bytes are read from the socket, before any parsing; a request of a closed loop starts when it
is written to its open connection. Otherwise 64 clients that start together would count each other's work."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from baton.runtime.status import printable
from launch.bench.load import PlannedRequest, Session
from launch.bench.stats import RequestRecord
from launch.cluster_api import request_json

CONNECT_TIMEOUT_S = 10.0
_MAX_SHOWN = 200
"""Maximum number of characters of a server's text in a report."""
_MAX_EVENT_BYTES = 16 << 20
_MAX_REFUSAL_BYTES = 64 << 10
_MAX_COUNT = 1 << 40
"""A number of tokens or milliseconds from a server must be below this limit."""
_read_at: dict[int, float] = {}
"""When each descriptor was last read (perf_counter). asyncio reads all ready sockets before it runs a task."""


class _TimedSocket(socket.socket):
    def recv(self, *args: Any) -> bytes:
        _read_at[self.fileno()] = time.perf_counter()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:  # with TLS
        _read_at[self.fileno()] = time.perf_counter()
        return super().recv_into(*args)


_TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a chat's piece that have text: vLLM calls reasoning `reasoning`, others `reasoning_content`."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """Where requests go. `base` ends in /v1. Without `reuses` each request has a connection of its own: llama.cpp's
    server closes one after a stream without saying so."""

    base: str
    model: str
    api_key: str
    timeout_s: float
    extra: dict[str, Any]
    reuses: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def base_url(url: str) -> str:
    """Returns the same URL, which ends in /v1, for `host:port`, `http://host:port` and `http://host:port/v1`.

    Raises:
        ValueError: it is none, or contains a user or a password, which every report would show.
    """
    given, url = url, (url if "//" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if not parts.hostname:
        raise ValueError(f"{given!r} is not an address")
    if "@" in parts.netloc:
        raise ValueError("a URL with a user or a password would appear in every report; use --api-key")
    return url if url.endswith("/v1") else f"{url}/v1"


def first_model(base: str, api_key: str) -> str:
    """Returns the first model of GET /v1/models.

    Raises:
        OSError: no usable response.
    """
    document = _get(f"{base}/models", api_key)
    try:
        name = str(document["data"][0]["id"])
        name.encode()  # half a surrogate pair could not be sent back
        return name
    except (LookupError, TypeError, UnicodeError):
        raise OSError(f"GET {base}/models: no list of models") from None


def supports_timeline(base: str, api_key: str) -> bool:
    """Whether the server can report where the time of a request went (`return_timeline`)."""
    return "return_timeline" in json.dumps(_about(base, "openapi.json", api_key))


def server_version(base: str, api_key: str) -> str:
    """Returns the version that GET /version reports; empty without one."""
    document = _about(base, "version", api_key)
    return printable(str(document.get("version", "")), _MAX_SHOWN) if isinstance(document, dict) else ""


def _about(base: str, path: str, api_key: str) -> Any:
    """Returns the JSON document at `path`, outside /v1; None if the server does not serve it."""
    try:
        return _get(f"{base.removesuffix('/v1')}/{path}", api_key)
    except OSError:
        return None


def _get(url: str, api_key: str) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        status, document = request_json("GET", url, CONNECT_TIMEOUT_S, headers=headers)
    except OSError as error:
        raise OSError(f"GET {url}: {describe(error)}") from None
    if status != 200:
        raise OSError(f"GET {url}: {_refusal(status, document)}")
    return document


def client_session(target: ServerTarget) -> aiohttp.ClientSession:
    """Creates a session for any number of concurrent requests; `send` limits their time. aiohttp uses two fifths of the
    processor time per event that httpx uses, and client and server often share their cores."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(_written)
    connector = aiohttp.TCPConnector(
        limit=0, socket_factory=lambda address: _TimedSocket(*address[:3]), force_close=not target.reuses
    )
    return aiohttp.ClientSession(connector=connector, headers=target.headers, timeout=timeout, trace_configs=[trace])


async def _written(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceRequestChunkSentParams) -> None:
    """Records when a request is written; aiohttp calls it as it writes the head and the body."""
    stream: _ServerStream = context.trace_request_ctx
    stream.written_at = stream.written_at or time.perf_counter()


async def run_load(
    target: ServerTarget, sessions: Iterable[Session], concurrency: int, done: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    """Sends the requests in a closed loop of `concurrency` clients, or in an open loop if it is 0. Calls `done` after
    each request. A failed request is a record too."""
    records: list[RequestRecord] = []

    async def run(http: aiohttp.ClientSession, session: Session, due: float | None = None) -> None:
        for number, job in enumerate(session.jobs):
            record = await send(http, target, job, due if number == 0 else None)
            records.append(record)
            done(record)

    async with client_session(target) as http:
        if concurrency:
            waiting = iter(sessions)

            async def client() -> None:
                for session in waiting:
                    await run(http, session)

            await asyncio.gather(*(client() for _ in range(concurrency)))
            return records
        running: set[asyncio.Task[None]] = set()
        began = time.perf_counter()
        for session in sessions:
            due = began + session.at_s
            await asyncio.sleep(due - time.perf_counter())
            task = asyncio.create_task(run(http, session, due))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    return records


async def send(
    session: aiohttp.ClientSession, target: ServerTarget, job: PlannedRequest, due: float | None = None
) -> RequestRecord:
    """Sends one request; a failure is a record too. With `due` (perf_counter) its times count from then, so that a
    late client hides no delay."""
    body = {
        "model": target.model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **job.body,
        **target.extra,
    }
    content = orjson.dumps(body)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    stream = _ServerStream()
    sent = time.perf_counter() if due is None else due
    try:
        async with asyncio.timeout(target.timeout_s):
            url = target.base + job.path
            async with session.post(url, data=content, headers=headers, trace_request_ctx=stream) as answer:
                if due is None:
                    sent = stream.written_at or sent
                if answer.status != 200:
                    return RequestRecord(sent, error=await _refused(answer))
                descriptor = _descriptor(answer)
                async for chunk in answer.content.iter_any():
                    stream.feed(_read_at.get(descriptor) or time.perf_counter(), chunk)
        return stream.record(sent, time.perf_counter())
    except aiohttp.ClientError as error:  # before TimeoutError: a connect timeout is both
        return RequestRecord(sent, error=describe(error))
    except TimeoutError:
        return RequestRecord(sent, error=f"timed out after {target.timeout_s:g} s", timed_out=True)
    except (OSError, ValueError) as error:
        return RequestRecord(sent, error=describe(error))


def _descriptor(answer: aiohttp.ClientResponse) -> int:
    """Returns the descriptor of its socket; -1 if the whole response has arrived and its connection was released."""
    transport = answer.connection.transport if answer.connection else None
    return transport.get_extra_info("socket").fileno() if transport else -1


class _ServerStream:
    """Server-sent events of one completion, as they arrive."""

    def __init__(self) -> None:
        self.written_at: float | None = None
        self._partial = bytearray()  # an incomplete line
        self._text: list[float] = []
        self._choices: list[float] = []
        self._finished_at: float | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._output_tokens: int | None = None
        self._error: str | None = None
        self._done = False
        self._stages: dict[str, float] = {}
        self._revision = ""
        self._token_ids: list[int] = []

    def feed(self, now: float, chunk: bytes) -> None:
        """Raises:
        ValueError: an event is not one of a completion, or exceeds _MAX_EVENT_BYTES.
        """
        first, *lines = chunk.split(b"\n")
        self._partial += first
        if len(self._partial) > _MAX_EVENT_BYTES:
            raise ValueError(f"an event exceeds {_MAX_EVENT_BYTES >> 20} MiB")
        if not lines:
            return
        lines.insert(0, bytes(self._partial))
        self._partial = bytearray(lines.pop())
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    self._event(now, line[5:].strip())
                except (AttributeError, LookupError, TypeError):
                    raise ValueError(f"not an event of a completion: {line[5:100]!r}") from None

    def record(self, sent: float, ended: float) -> RequestRecord:
        if self._error is None and not self._done:
            self._error = "stream ended without [DONE]"
        # Tokens that decode to nothing (half a character, ids beyond the vocabulary) carry no text; if no event carries
        # text, the arrivals of all events count.
        arrivals = self._text or self._choices
        if self._error is None and not arrivals:
            self._error = "stream ended without a token"
        if self._error is not None:
            return RequestRecord(sent, error=self._error)
        return RequestRecord(
            sent,
            tuple(arrivals),
            ended,
            finished=max(arrivals[-1], self._finished_at or 0.0),
            prompt_tokens=self._prompt_tokens or 0,
            cached_tokens=self._cached_tokens,
            output_tokens=len(self._choices) if self._output_tokens is None else self._output_tokens,
            counted=self._output_tokens is not None,
            stages=self._stages,
            revision=self._revision,
            token_ids=tuple(self._token_ids),
        )

    def _event(self, now: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = orjson.loads(data)
        if event.get("error"):
            self._error = _message(event["error"])
            return
        if usage := event.get("usage"):
            self._prompt_tokens = _tokens(usage, "prompt_tokens")
            self._cached_tokens = _tokens(usage.get("prompt_tokens_details") or {}, "cached_tokens")
            self._output_tokens = _tokens(usage, "completion_tokens")
        for choice in itertools.islice(event.get("choices") or (), 1):
            self._choices.append(now)
            self._token_ids += choice.get("token_ids") or ()
            delta = choice.get("delta") or {}  # in a chat: text, reasoning, or part of a tool call
            if choice.get("text") or any(map(delta.get, _TEXTS)):
                self._text.append(now)
            if isinstance(timeline := choice.get("timeline"), dict):
                self._revision = printable(str(timeline.get("revision", "")), _MAX_SHOWN)
                for span in timeline["spans"]:
                    name, ms = printable(span["name"], _MAX_SHOWN), span["ms"]
                    if not (math.isfinite(ms) and 0 <= ms < _MAX_COUNT):
                        raise ValueError(f"timeline: invalid duration of {name}: {ms} ms")
                    self._stages[name] = self._stages.get(name, 0.0) + ms / 1e3
            if choice.get("finish_reason"):
                self._finished_at = now


def _tokens(usage: dict[str, Any], name: str) -> int | None:
    """Returns a token count of `usage`; None if the server does not report it."""
    count = usage.get(name)
    if count is not None and not (isinstance(count, int) and 0 <= count < _MAX_COUNT):
        raise ValueError(f"usage: invalid {name}: {str(count)[:50]}")
    return count


def describe(error: BaseException) -> str:
    text = printable(" ".join(str(error).split()), _MAX_SHOWN)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _refused(answer: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > _MAX_REFUSAL_BYTES:
            break
    try:
        return _refusal(answer.status, orjson.loads(body))
    except ValueError:
        return _refusal(answer.status, None)


def _refusal(status: int, document: Any) -> str:
    try:
        return f"status {status}: {_message(document['error'])}"
    except (LookupError, TypeError):
        return f"status {status}"


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return printable(" ".join(str(text).split()), _MAX_SHOWN)
