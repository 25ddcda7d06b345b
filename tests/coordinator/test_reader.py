"""Tokens that go to a sink in the callback in which they arrive, and what still wakes the reader's task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.commands import Prefill
from baton.core.errors import DeadlineExceeded
from baton.core.request import SequenceId
from coordinator.http import server as http_server
from coordinator.http.app import HttpSettings, create_app
from coordinator.reader import MAX_PUSHED_TOKENS
from coordinator.submission import Delta, Submission
from coordinator.text.model import TextModel
from tests.support.fake_workers import Bench, FakeWorker, bench
from tests.support.front_kit import RawClient, running
from tests.support.nodes import until
from tests.support.tokenizers_kit import byte_level


@dataclass
class FakeSink:
    ready: bool = True
    taken: list[Delta] = field(default_factory=list)
    fails: bool = False

    def take(self, delta: Delta) -> None:
        if self.fails:
            raise ValueError("the sink is broken")
        self.taken.append(delta)


class Run:
    """A request whose deltas go to `sink` or are yielded."""

    def __init__(self, b: Bench, sink: FakeSink, **more: Any) -> None:
        self.b, self.sink = b, sink
        self.yielded: list[Delta] = []
        self.submission = Submission(**{"request_id": "r", "prompt": (1, 2), "max_tokens": 50, **more})
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for delta in self.b.pipeline.generate(self.submission, self.sink):
            self.yielded.append(delta)

    async def begun(self) -> tuple[FakeWorker, SequenceId]:
        """Waits until token 1 has been read, with the KV handed over; returns the decode worker and the sequence."""
        p, d = self.b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        await until(lambda: len(self.yielded) == 1)
        return d, s

    def tokens(self, deltas: list[Delta]) -> list[int]:
        return [t for delta in deltas for t in delta.token_ids]

    async def until_tokens(self, count: int) -> None:
        await until(lambda: len(self.tokens(self.yielded)) + len(self.tokens(self.sink.taken)) == count)


async def test_all_but_the_first_and_the_last_delta_go_to_the_sink() -> None:
    async with bench("p0", "d0") as b:
        run = Run(b, FakeSink(), max_tokens=6)
        d, s = await run.begun()
        for index in range(1, 6):
            d.report(s, index, 5 + index)
            await run.until_tokens(index + 1)
        await run.task
        assert run.tokens(run.sink.taken) == [6, 7, 8, 9]
        assert run.tokens(run.yielded) == [5, 10] and run.yielded[-1].finish_reason == "length"
        assert b.pipeline._metrics.tokens.generated == 6  # the sink's tokens are counted too


async def test_the_reader_receives_all_tokens_while_the_sink_is_not_ready() -> None:
    async with bench("p0", "d0") as b:
        run = Run(b, FakeSink(), max_tokens=6)
        d, s = await run.begun()
        run.sink.ready = False
        d.report(s, 1, 6, 7)
        await run.until_tokens(3)
        run.sink.ready = True
        d.report(s, 3, 8)
        await run.until_tokens(4)
        d.report(s, 4, 9, 10)
        await run.task
        assert (run.tokens(run.yielded), run.tokens(run.sink.taken)) == ([5, 6, 7, 9, 10], [8])


async def test_tokens_are_kept_for_the_reader_while_it_is_busy() -> None:
    async with bench("p0", "d0") as b:
        sink, submission = FakeSink(), Submission("r", (1, 2), 4)
        deltas = b.pipeline.generate(submission, sink)
        first = asyncio.ensure_future(anext(deltas))
        p, d = b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await first
        p.hand_over(s, "d0")
        d.report(s, 1, 6, 7)
        request = b.in_flight(s)
        await until(lambda: request.next_index == 3)
        assert sink.taken == []  # no task waits for them yet
        assert (await anext(deltas)).token_ids == (6, 7)
        last = asyncio.ensure_future(anext(deltas))
        d.report(s, 3, 8, ended="length")
        assert (await last).finish_reason == "length"
        await deltas.aclose()


async def test_a_stop_string_in_pushed_tokens_ends_the_stream() -> None:
    async with bench("p0", "d0") as b:
        tokens = list(byte_level().encode("Hello, Hello world").ids)
        run = Run(b, FakeSink(), stop=("lo wor",))
        p, d = b.workers
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, tokens[0])
        p.hand_over(s, "d0")
        await until(lambda: run.yielded)
        choice = b.in_flight(s)
        for index, token in enumerate(tokens[1:], 1):
            d.report(s, index, token)
            await until(lambda index=index: choice.next_index > index or run.task.done())  # type: ignore[misc]
        await run.task
        text = "".join(delta.text for delta in [run.yielded[0], *run.sink.taken, *run.yielded[1:]])
        assert text == "Hello, Hel" and run.yielded[-1].stop_reason == "lo wor" and run.sink.taken


async def test_a_delta_of_many_tokens_is_not_built_in_the_callback() -> None:
    async with bench() as b:
        for name in ("p0", "d0"):
            await b.add(name, blocks=100, max_model_len=400)
        run = Run(b, FakeSink(), max_tokens=200)
        d, s = await run.begun()
        many = MAX_PUSHED_TOKENS + 1
        d.report(s, 1, *[7] * many)
        await run.until_tokens(1 + many)
        assert run.sink.taken == [] and len(run.yielded) == 2
        run.task.cancel()
        await asyncio.wait([run.task])


async def test_a_failing_sink_ends_only_its_request_and_not_the_worker_session() -> None:
    async with bench("p0", "d0") as b:
        run = Run(b, FakeSink(fails=True))
        d, s = await run.begun()
        d.report(s, 1, 6)
        with pytest.raises(ValueError, match="the sink is broken"):
            await run.task
        assert [row.outcome for row in b.pipeline.requests(10)] == ["internal_error"]
        await b.submit_and_run("other", "p0", "d0")
        assert len(d.welcomes) == 1


async def test_a_pushed_stream_ends_at_its_deadline() -> None:
    async with bench("p0", "d0") as b:
        run = Run(b, FakeSink(), deadline_s=0.4)
        d, s = await run.begun()
        d.report(s, 1, 6)
        await run.until_tokens(2)
        with pytest.raises(DeadlineExceeded):
            await run.task
        assert run.tokens(run.sink.taken) == [6]


async def test_deltas_of_several_choices_go_to_the_reader_and_not_to_the_sink() -> None:
    """A task merges their deltas, so none go to the sink."""
    async with bench("p0", "d0") as b:
        run = Run(b, FakeSink(), n=2, max_tokens=2)
        p, d = b.workers
        for choice in range(2):
            s = (await p.received(Prefill, choice + 1)).request.sequence_id
            p.report(s, 0, 5)
            p.hand_over(s, "d0")
            d.report(s, 0, 5, 6, ended="length")
        await run.task
        assert run.sink.taken == [] and run.tokens(run.yielded) == [5, 6, 5, 6]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collects what is written to the connection without the answer's task."""
    found: list[bytes] = []
    write: Callable[[Any, bytes], None] = http_server.ChunkWriter.write

    def counted(self: Any, body: bytes) -> None:
        found.append(body)
        write(self, body)

    monkeypatch.setattr(http_server.ChunkWriter, "write", counted)
    return found


async def test_an_http_stream_has_the_same_events_with_and_without_pushing(
    text_model: TextModel, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events are equal, except for ids and times."""
    tokens = list(byte_level().encode("Hello, one two three four five").ids)
    answers = []
    async with bench("p0", "d0") as b:
        p, d = b.workers
        app = create_app(b.pipeline, text_model, HttpSettings("tiny"))
        async with running(app) as server:
            for turn in range(2):
                client = await RawClient.connect(server)
                body = {"prompt": [1, 2, 3], "max_tokens": len(tokens), "stream": True}
                body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
                await client.post("/v1/completions", body, "Connection: close")
                s = (await p.received(Prefill, turn + 1)).request.sequence_id
                p.report(s, 0, tokens[0])
                p.hand_over(s, "d0")
                answer = await _read_events(client, b"", 1)
                for index, token in enumerate(tokens[1:], 1):
                    d.report(s, index, token, ended="length" * (index == len(tokens) - 1))
                    answer = await _read_events(client, answer, index + 1)
                async with asyncio.timeout(30):
                    answers.append(_events(answer + await client.reader.read()))
                await client.close()
                monkeypatch.setattr(http_server.ChunkWriter, "ready", False)
    assert answers[0] == answers[1] and len(answers[0]) == len(tokens) + 1
    assert len(written) == len(tokens) - 2  # of the first answer, all but the first and the last token


async def test_an_empty_delta_does_not_end_the_chunked_body(written: list[bytes]) -> None:
    """A delta may produce no event, and an empty chunk would end the answer."""

    cycle = SimpleNamespace(transport=SimpleNamespace(write=written.append))
    writer = http_server.ChunkWriter(cycle)  # type: ignore[arg-type]
    written.clear()
    for body in (b"", b"abc", b""):
        writer.write(body)
    assert [part for part in written if b"\r\n" in part] == [b"3\r\nabc\r\n"]


async def _read_events(client: RawClient, data: bytes, count: int) -> bytes:
    async with asyncio.timeout(30):
        while data.count(b"data: {") < count:
            data += await client.reader.read(1 << 16)
    return data


def _events(answer: bytes) -> list[Any]:
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    parsed = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    return [{key: value for key, value in event.items() if key not in ("id", "created")} for event in parsed]
