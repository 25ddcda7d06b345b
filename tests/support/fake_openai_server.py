"""An OpenAI-compatible completion server with known delays, on a thread, for testing the benchmark client.

One event per token: the first after `first_s` plus `first_s_each` for each concurrent request, the others at intervals
of `gap_s`. `fail_every`: every n-th request gets status 503; `error_event_every`: every n-th stream has an error event
after its first token; `usage` false: no usage event; `caches`: usage has cached tokens, all of a prompt that was sent
before; `empty_text_every`: every n-th token has no text; `odd_event` is sent before [DONE] in every other stream.
`served` counts requests, `bodies` has their contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    first_s: float = 0.0
    gap_s: float = 0.0
    first_s_each: float = 0.0
    fail_every: int = 0
    error_event_every: int = 0
    usage: bool = True
    caches: bool = False
    empty_text_every: int = 0
    odd_event: str = ""
    model: str = "fake"
    url: str = ""
    served: int = 0
    most_at_once: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _at_once: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")
                ]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                if head.startswith("GET /v1/models "):
                    _whole(writer, 200, {"data": [{"id": self.model}]})
                else:
                    await self._complete(writer, json.loads(body))
                await writer.drain()
        writer.close()

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.served += 1
        number = self.served
        self.bodies.append(body)
        if self.fail_every and number % self.fail_every == 0:
            _whole(writer, 503, {"error": {"message": "too busy", "code": "overloaded"}})
            return
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            await self._stream(writer, body, self.error_event_every and number % self.error_event_every == 0)
            if self.odd_event and number % 2:
                _event(writer, self.odd_event.encode())
            _event(writer, b"[DONE]")
            writer.write(b"0\r\n\r\n")
        finally:
            self._at_once -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], breaks: bool | int) -> None:
        count = body["max_tokens"]
        for index in range(count):
            await asyncio.sleep(self.gap_s if index else self.first_s + self.first_s_each * self._at_once)
            if breaks and index == 1:
                _event(writer, json.dumps({"error": {"message": "worker lost"}}).encode())
                return
            text = "" if self.empty_text_every and index % self.empty_text_every == 0 else f"t{index} "
            reason = "length" if index == count - 1 else None
            _event(writer, json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}]}).encode())
            await writer.drain()
        if self.usage:
            prompt = body["prompt"]
            tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
            usage: dict[str, Any] = {
                "prompt_tokens": tokens,
                "completion_tokens": count,
                "total_tokens": tokens + count,
            }
            if self.caches:
                cached = tokens if sum(earlier["prompt"] == prompt for earlier in self.bodies) > 1 else 0
                usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
            _event(writer, json.dumps({"choices": [], "usage": usage}).encode())


@contextlib.contextmanager
def fake_server(**behaviour: Any) -> Iterator[FakeServer]:
    """Listens on a free loopback port while the block runs."""
    fake = FakeServer(**behaviour)
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stopped.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="fake-openai-server")
    thread.start()
    assert started.wait(10), "the fake server did not start"
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()


def _whole(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
