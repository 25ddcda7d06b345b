"""One request as an HTTP answer: the choices of its prompt, or of its prompts, with one generation per prompt.

    wait for the first delta -> status line (200, or that of an error) -> events, or one object at the end

The answer runs as one task, and another task waits for the client to disconnect; whichever ends first cancels the
other, so a disconnect closes the generator immediately, streaming or not. The next delta is requested from the
generator only when the socket has accepted the previous one: a slow reader delays only its own stream and uses no extra
memory (the server closes the connection of a client that reads nothing). While the answer waits for a delta, arriving
deltas are written directly (`_Stream.take`), without a switch to its task.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.core.errors import InvalidRequest, InvariantError, Unavailable
from baton.core.events import SpeculationCounters
from baton.core.request import TokenLogprob
from baton.runtime.event_loop import off_loop
from coordinator.anthropic.render import MessagesRender
from coordinator.http.errors import REQUEST_ID, error_response, note
from coordinator.http.guard import CLIENT
from coordinator.http.server import SEND, WRITER, ChunkWriter
from coordinator.inference.render import InferRender
from coordinator.inference.served import CountingPipeline
from coordinator.openai.render import Render, server_timing
from coordinator.openai.responses_render import ResponsesRender
from coordinator.pipeline import Pipeline, generate_all
from coordinator.policy.quotas import Client
from coordinator.submission import SESSION, Delta, Sink, Submission, Usage, is_large
from coordinator.text.parser import Event

Renderer = Render | ResponsesRender | MessagesRender | InferRender
ADAPTER = "baton.adapter"
"""The scope key of the digest of the LoRA adapter that a request chose; empty for none."""
DEADLINE = "x-request-timeout-ms"
SPLIT_HEADER = "x-baton-split"
_NOT_DECIDED = "apart: --split always"
SLICE_BYTES = 32 * 1024
_NOT_SHOWN = Usage(0, 0)
LARGE_ANSWER_BYTES = 1 << 20
MAX_LARGE_BYTES = 256 << 20
"""Limit on all whole answers over LARGE_ANSWER_BYTES: a 1 KB request may cause 80 MB of log-probabilities."""
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

QUIET_S = 10.0
"""A stream without output for this long, for example because its request waits for a worker to start, gets KEEP_ALIVE:
proxies and clients close connections that are silent for 30 s or longer."""
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which parsers of server-sent events ignore

log = logging.getLogger("baton.http")


class EchoOnly:
    """A generator whose answers end with their prompt, for `echo` with no tokens to generate. One token is generated
    anyway, because the prompt's log-probabilities come with it, and is discarded."""

    def __init__(self, generator: Pipeline) -> None:
        self._generator = generator

    def admitted(self, client: Client, choices: int = 1) -> AbstractContextManager[None]:
        return self._generator.admitted(client, choices)

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        async with aclosing(self._generator.generate(submission)) as deltas:
            async for delta in deltas:
                usage = None if delta.usage is None else replace(delta.usage, completion_tokens=0)
                finish = delta.finish_reason and "length"
                yield delta._replace(
                    text="", token_ids=(), logprobs=(), events=None, finish_reason=finish, stop_reason=None, usage=usage
                )


class _Counted:
    """The usage of an answer so far. A prompt counts once; a choice's last delta has the final count of its tokens."""

    def __init__(self, submissions: Sequence[Submission]) -> None:
        self._n = submissions[0].n
        self._left = self._n * len(submissions)
        self._completion: Counter[int] = Counter()
        self._prompts, self._cached = [len(submission.prompt) for submission in submissions], 0
        self._speculation: SpeculationCounters | None = None
        self._reasoning = 0

    def add(self, delta: Delta) -> bool:
        """Counts a delta; returns whether more are to come."""
        self._completion[delta.choice] += len(delta.token_ids)
        if delta.usage is not None:
            self._completion[delta.choice] = delta.usage.completion_tokens
            self._prompts[delta.choice // self._n] = delta.usage.prompt_tokens
            if delta.choice % self._n == 0:
                self._cached += delta.usage.cached_tokens
            self._reasoning += delta.usage.reasoning_tokens
            if (drafted := delta.usage.speculation) is not None:
                self._speculation = drafted if self._speculation is None else self._speculation + drafted
        self._left -= delta.finish_reason is not None
        return self._left > 0

    @property
    def usage(self) -> Usage:
        return Usage(sum(self._prompts), self._completion.total(), self._cached, self._speculation, self._reasoning)


class _Whole:
    """One choice of an answer that is not streamed: merges its deltas into one as they arrive."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._events: list[Event] = []
        self._first: Delta | None = None
        self._last = Delta("", ())

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._events += delta.events or ()
        self._first, self._last = self._first or delta, delta

    def delta(self) -> Delta:
        return self._last._replace(
            text="".join(self._texts),
            events=None if self._last.events is None else tuple(self._events),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._first and self._first.prompt_logprobs,
        )


class _Stream:
    """The sink of a stream of one choice: writes its events directly to the connection once the answer has begun."""

    def __init__(self, render: Renderer, counted: _Counted, writer: ChunkWriter, quiet: _Quiet) -> None:
        self._render, self._counted, self._writer, self._quiet = render, counted, writer, quiet

    @property
    def ready(self) -> bool:
        return self._writer.ready

    def take(self, delta: Delta) -> None:
        render, usage = self._render, _NOT_SHOWN
        if render.continuous_usage:  # otherwise the last delta, which never comes here, has the total
            self._counted.add(delta)
            usage = self._counted.usage
        if render.needs_event(delta):
            self._writer.write(render.text(delta, usage))
            self._quiet.wrote = True


class _Quiet:
    """Keeps the connection of a stream that has begun alive. State: whether anything was written since the last look,
    and whether an event is being written, which a comment must not interrupt."""

    def __init__(self, writer: ChunkWriter | None) -> None:
        self._writer, self.wrote, self.writing = writer, True, False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._writer is not None:
            self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._writer is not None and not (self.wrote or self.writing) and self._writer.ready:
            self._writer.write(KEEP_ALIVE)
        self.wrote = False
        self.start()


class _LargeAnswers:
    """Limits the whole answers over LARGE_ANSWER_BYTES that are being sent. State: their total bytes."""

    def __init__(self) -> None:
        self._bytes = 0

    @contextmanager
    def sent(self, response: Response, scope: Scope) -> Iterator[Response]:
        """Yields the answer to send: a 503 if it is large and would exceed MAX_LARGE_BYTES together with others."""
        size = len(response.body)
        if size <= LARGE_ANSWER_BYTES:
            size = 0
        elif self._bytes and self._bytes + size > MAX_LARGE_BYTES:
            message = f"{self._bytes >> 20} MiB of large responses are already being sent"
            size, response = 0, error_response(Unavailable(message, retry_after_s=5), scope)
        self._bytes += size
        try:
            yield response
        finally:
            self._bytes -= size


_LARGE = _LargeAnswers()


class GenerationResponse(Response):
    """Runs `submissions`, one per prompt, when it is sent. All have the same number of choices; those of the second
    prompt are numbered after those of the first."""

    def __init__(
        self,
        generator: Pipeline | EchoOnly | CountingPipeline,
        submissions: Sequence[Submission],
        render: Renderer,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._generator = generator
        self._submissions = submissions
        self._render = render
        self._stream = stream
        self._counted = _Counted(submissions)
        self._has_started = False  # whether the head of a stream was sent
        self._quiet = _Quiet(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(scope, receive, send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
            ended = answer.done()
        finally:
            answer.cancel()
            disconnect.cancel()
            await asyncio.gather(answer, disconnect, return_exceptions=True)
        if not ended:
            log.info("%s: client disconnected", self._submissions[0].request_id)
        elif answer.cancelled():
            raise InvariantError("the generator cancelled the calling task")
        elif (error := answer.exception()) is not None:
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = self._deltas(scope)
        try:
            try:
                if self._stream:
                    delta, response = await self._first(deltas, send), None
                else:
                    delta = await self._next(deltas)
                    response = await self._whole(delta, deltas, _split_header(scope, delta))
            except Exception as error:
                if self._has_started:
                    note(error)
                    await self._write(send, self._render.failed(error), more=False)
                    return
                response = error_response(error, scope)
            if response is not None:
                with _LARGE.sent(response, scope) as response:
                    head = {"status": response.status_code, "headers": response.raw_headers}
                    await send({"type": "http.response.start", **head})
                    await self._write(send, bytes(response.body), more=False)
            else:
                await self._events(delta, deltas, scope, send)
        finally:
            self._quiet.stop()
            await deltas.aclose()

    async def _first(self, deltas: AsyncGenerator[Delta, None], send: Send) -> Delta:
        """Returns the first delta of a stream. If that takes longer than QUIET_S, the answer begins before it, and an
        error can then only be an event."""
        first = asyncio.ensure_future(self._next(deltas))
        try:
            while not (await asyncio.wait((first,), timeout=QUIET_S))[0]:
                await self._begin(send)
                await self._write(send, KEEP_ALIVE)
            return first.result()
        finally:
            first.cancel()
            await asyncio.wait((first,))  # the generator cannot be closed while it runs

    async def _begin(self, send: Send, more: Mapping[str, str] = MappingProxyType({})) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [(name.encode(), value.encode()) for name, value in {**_SSE_HEADERS, **more}.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _deltas(self, scope: Scope) -> AsyncGenerator[Delta, None]:
        writer = scope.get(WRITER) if self._stream else None
        self._quiet = _Quiet(writer)
        if len(self._submissions) == 1:
            sink = None if writer is None else _Stream(self._render, self._counted, writer, self._quiet)
            return self._generator.generate(self._submissions[0], sink)
        return generate_all(self._generator, self._submissions)

    async def _whole(self, delta: Delta, deltas: AsyncGenerator[Delta, None], split: Mapping[str, str]) -> Response:
        counted = self._counted
        choices = [_Whole() for _ in range(self._submissions[0].n * len(self._submissions))]
        choices[delta.choice].add(delta)
        while counted.add(delta):
            delta = await self._next(deltas)
            choices[delta.choice].add(delta)
        answers = [choice.delta() for choice in choices]
        body = await off_loop(is_large(answers), self._render.whole, answers, counted.usage)
        times = server_timing(answers[0].timeline)
        headers = {"content-type": "application/json", **times, **split, **self._render.headers}
        return Response(body, headers=headers)

    async def _events(self, delta: Delta, deltas: AsyncGenerator[Delta, None], scope: Scope, send: Send) -> None:
        await self._begin(send, _split_header(scope, delta))
        self._quiet.start()
        send = scope.get(SEND, send)
        counted, render, opened = self._counted, self._render, set[int]()
        body, more = b"", True
        try:
            while more:
                more = counted.add(delta)
                usage = counted.usage if render.continuous_usage else _NOT_SHOWN
                large = is_large([delta])
                if delta.choice not in opened:
                    opened.add(delta.choice)
                    of_prompt = large or render.has_large_opening
                    body += await off_loop(of_prompt, render.opening, delta, usage)
                if delta.finish_reason is not None:
                    body += await off_loop(large, render.last, delta, usage)
                elif render.needs_event(delta):
                    text = await asyncio.to_thread(render.text, delta, usage) if large else render.text(delta, usage)
                    body += text
                if body and more:
                    await self._write(send, body)
                    body = b""
                if more:
                    delta = await self._next(deltas)
            body += render.closing(counted.usage) + render.end
        except Exception as error:
            note(error)
            body += render.failed(error)
        await self._write(send, body, more=False)

    async def _next(self, deltas: AsyncGenerator[Delta, None]) -> Delta:
        """Returns the next delta. Raises the generator's errors, or InvariantError if it ends too early."""
        try:
            return await anext(deltas)
        except StopAsyncIteration:
            raise InvariantError("the generator ended without a finish reason") from None

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Sends in slices and returns when the socket has accepted enough; the server closes the connection of a client
        that reads nothing."""
        remainder = memoryview(body)
        self._quiet.wrote = self._quiet.writing = True
        while True:
            part, remainder = remainder[:SLICE_BYTES], remainder[SLICE_BYTES:]
            await send({"type": "http.response.body", "body": bytes(part), "more_body": more or bool(remainder)})
            if not remainder:
                self._quiet.writing = False
                return


def owned(submission: Submission, request: Request) -> Submission:
    """Returns the submission with the client, the adapter, the traceparent, the session and the deadline of the
    request. Raises InvalidRequest if that is not a number of milliseconds."""
    scope, headers = request.scope, request.headers
    if (limit_s := time_limit_s(request)) is not None:
        submission = replace(submission, deadline_s=min(submission.deadline_s, limit_s))
    sent = headers.get("traceparent", ""), headers.get(SESSION, "")
    return submission.of(scope[CLIENT], *sent, adapter=scope.get(ADAPTER, ""))


def time_limit_s(request: Request) -> float | None:
    """Returns the seconds that a request may take, if its header says. Raises InvalidRequest if that is not a number of
    milliseconds."""
    given = request.headers.get(DEADLINE)
    if given is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", given):
        message = f"{DEADLINE} must be a whole number of milliseconds from 1 to 999999999"
        raise InvalidRequest(message, param=DEADLINE)
    return int(given) / 1e3


def unique_id(request: Request) -> str:
    """Returns the internal id of the request. A client's own id may not be unique: gateways reuse it for a retry while
    the first try is still ending."""
    name: str = request.scope[REQUEST_ID]
    return f"{name}-{secrets.token_hex(4)}" if "x-request-id" in request.headers else name


def _split_header(scope: Scope, delta: Delta) -> Mapping[str, str]:
    """Returns the header that says where the first prompt was computed and why, if the request asks for it by sending
    that header with any value. A stream that began with a keep-alive comes without it: that was not decided yet."""
    asked = any(name == SPLIT_HEADER.encode() for name, _ in scope["headers"])
    return {SPLIT_HEADER: delta.split or _NOT_DECIDED} if asked else {}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
