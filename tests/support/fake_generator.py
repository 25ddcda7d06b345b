"""A scripted pipeline, for tests of front ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from baton.core.errors import BatonError
from baton.core.request import FinishReason
from coordinator.pipeline import with_grammar
from coordinator.policy.adapters import AdapterTable
from coordinator.policy.quotas import Client, Quotas
from coordinator.recent import Record
from coordinator.structured_output import GrammarCompiler
from coordinator.submission import Delta, Sink, Submission, Timeline, Usage
from coordinator.text.parser import Parser

Step = Delta | BaseException | float | asyncio.Event


def reply(
    *texts: str,
    finish: FinishReason = "stop",
    stop_reason: str | int | None = None,
    prompt_tokens: int = 3,
    cached: int = 1,
) -> list[Step]:
    """Returns one delta of one token for each text, the last with finish reason, usage and timeline."""
    deltas: list[Step] = [Delta(text, (i,)) for i, text in enumerate(texts[:-1])]
    usage = Usage(prompt_tokens, len(texts), cached)
    last = Delta(texts[-1], (len(texts) - 1,), finish, stop_reason, usage, Timeline(queue_s=0.001, decode_s=0.25))
    return [*deltas, last]


class FakeGenerator:
    """Plays `script` for every submission: yields a Delta, raises an exception, sleeps for a float, awaits an Event. If
    the output is constrained, `grammars` compiles the grammar first, as in the pipeline.

    `submissions` has the received submissions, `finished` the ids of those that were played to the end or closed,
    `yielded` counts deltas.
    """

    def __init__(self, script: Sequence[Step] | None = None, *, not_ready: str = "", endless: bool = False) -> None:
        self.script: Sequence[Step] = reply("Hello", " world") if script is None else script
        self.not_ready = not_ready
        self.endless = endless
        self.submissions: list[Submission] = []
        self.finished: list[str] = []
        self.yielded = 0
        self.changed = asyncio.Event()
        self.statuses: list[int] = []
        self.answer_times: list[float] = []
        self.no_room: BatonError | None = None
        self.time_limits: list[float | None] = []
        self.quotas = Quotas()
        self.ignored_fields: list[tuple[str, str]] = []
        self.records: list[Record] = []
        self.grammars: GrammarCompiler | None = None
        self.pools_hold: int | None = None
        self.adapters = AdapterTable()

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        submission = await with_grammar(submission, self.grammars)
        self.submissions.append(submission)
        self._note()
        parsers = [submission.new_parser() for _ in range(submission.n)]
        try:
            while True:
                for step in self.script:
                    if isinstance(step, Delta):
                        await asyncio.sleep(0)
                        self.yielded += 1
                        yield _parsed(step, parsers)
                    elif isinstance(step, BaseException):
                        raise step
                    elif isinstance(step, asyncio.Event):
                        await step.wait()
                    else:
                        await asyncio.sleep(step)
                if not self.endless:
                    return
        finally:
            self.finished.append(submission.request_id)
            self._note()

    def max_model_len(self, prompt_tokens: int) -> int | None:
        return self.pools_hold

    def check_room(self, client: Client, limit_s: float | None = None) -> None:
        self.time_limits.append(limit_s)
        if self.no_room is not None:
            raise self.no_room

    @contextmanager
    def admitted(self, client: Client, choices: int = 1) -> Iterator[None]:
        self.quotas.admit(client, time.monotonic(), choices)
        try:
            yield
        finally:
            self.quotas.ended(client, time.monotonic(), choices)

    def ready(self) -> tuple[bool, str]:
        return not self.not_ready, self.not_ready

    def expect_workers(self) -> None:
        self.not_ready = ""

    def workers(self) -> dict[str, object]:
        row = {"id": "prefill-0", "role": "prefill", "state": "ready", "blocks_total": 10, "blocks_free": 4}
        own = {"requests": 5, "queued": 2, "choices": 9, "queued_choices": 3}
        return {"workers": [row, row | {"id": "d", "role": "decode"}], "coordinator": own}

    async def until(self, *, submitted: int = 0, finished: int = 0, timeout_s: float = 30.0) -> None:
        """Waits until `submitted` submissions have been received and `finished` have ended."""
        async with asyncio.timeout(timeout_s):
            while len(self.submissions) < submitted or len(self.finished) < finished:
                self.changed.clear()
                await self.changed.wait()

    def _note(self) -> None:
        self.changed.set()

    def requests(self, limit: int) -> list[Record]:
        return self.records[:limit]

    def request(self, request_id: str) -> list[Record]:
        return [record for record in self.records if record.request_id == request_id]

    async def metrics(self, batches: Mapping[str, Any] | None = None) -> bytes:
        return f"# batches: {batches}\n".encode()

    def ignored(self, endpoint: str, names: Collection[str]) -> None:
        self.ignored_fields += [(endpoint, name) for name in sorted(names)]

    def answered(self, status: int, seconds: float) -> None:
        self.statuses.append(status)
        self.answer_times.append(seconds)


def _parsed(delta: Delta, parsers: Sequence[Parser | None]) -> Delta:
    """Returns a delta as a pipeline does whose submission has a parser."""
    if (parser := parsers[min(delta.choice, len(parsers) - 1)]) is None:
        return delta
    events = parser.push(delta.text) + (parser.finish() if delta.finish_reason is not None else [])
    return delta._replace(text="", events=tuple(events))
