"""The requests to send: prompts, lengths and due times, the same for the same seed. No I/O."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sim.scale.workload import Lengths
from sim.trace import TRACE_BLOCK, TraceRow

_WORDS = """
    the of and to in is that for it was on are as with they be at one have this from by hot but some what there
    we can out other were all your when up use word how said an each she which do their time if will way about
    many then them would write like so these her long make thing see him two has look more day could go come did
    my
""".split()  # noqa: SIM905
Workload = Literal["tokens", "text", "turns", "tools", "schema"]
TOKEN_IDS = Lengths(300, 3999)
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
_TOOL = {
    "type": "function",
    "function": {
        "name": "book_table",
        "description": "Books a table in a restaurant.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "people": {"type": "integer"}, "outside": {"type": "boolean"}},
            "required": ["name", "people", "outside"],
            "additionalProperties": False,
        },
    },
}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "table", "schema": _TOOL["function"]["parameters"]}}  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: the path of the API, and the part of its body that the workload determines."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that one client sends one after the other. In an open loop the first is sent `at_s` seconds after the
    run began; each later one is sent when its predecessor has ended."""

    jobs: tuple[PlannedRequest, ...]
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All requests of a run.

    tokens  random token ids, so that every server counts the same
    text    random words, as many as the input length
    turns   conversations of `turns` requests: each prompt is the previous one, random tokens for the answer and
            `input_len` new tokens, after `shared_len` tokens that all conversations start with
    tools   a chat that must call a function
    schema  a chat whose answer must match a JSON schema

    With `rate`, sessions start at random times (a Poisson process), with `rate` requests per second on average in all
    of their turns. With a `trace`, its rows determine the times and lengths, replayed `scale` times as fast.
    """

    seed: int
    input_len: Lengths
    output_len: Lengths
    workload: Workload = "tokens"
    token_ids: Lengths = TOKEN_IDS
    turns: int = 1
    shared_len: int = 0
    rate: float = 0.0
    trace: tuple[TraceRow, ...] = field(default=(), repr=False)
    scale: float = 1.0

    @property
    def is_open(self) -> bool:
        """Whether requests are sent when they are due, regardless of earlier ones."""
        return self.rate > 0 or bool(self.trace)

    def sessions(self, first: int, requests: int) -> Iterator[Session]:
        """Yields sessions with `requests` requests in all, from number `first` on. Prompts of different sessions differ
        from their first token on, except for prefixes that they share by design: no prefix cache helps by chance."""
        due = random.Random(f"{self.seed}/arrivals/{first}")
        at_s, left, number = 0.0, requests, first
        per_session = self.turns if self.workload == "turns" else 1
        origin = self.trace[0].at_s if self.trace else 0.0
        while left > 0:
            if self.trace:
                if number - first >= len(self.trace):
                    return
                row = self.trace[number - first]
                jobs: tuple[PlannedRequest, ...] = (self._traced(row, number, first),)
                at_s = (row.at_s - origin) / self.scale
            else:
                jobs = self._jobs(number)[:left]
                at_s += due.expovariate(self.rate / per_session) if self.rate else 0.0
            yield Session(jobs, at_s)
            left -= len(jobs)
            number += 1

    def job(self, number: int) -> PlannedRequest:
        """Returns the first request of session `number`."""
        return self._jobs(number)[0]

    def _jobs(self, number: int) -> tuple[PlannedRequest, ...]:
        source = random.Random(f"{self.seed}/{number}")
        if self.workload == "turns":
            return tuple(self._turns(source))
        length, max_tokens = self.input_len.draw(source), self.output_len.draw(source)
        if self.workload == "tokens":
            return (completion(self._ids(source, length), max_tokens),)
        words = " ".join(source.choices(_WORDS, k=length))
        if self.workload == "text":
            return (completion(words, max_tokens),)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": max_tokens}
        if self.workload == "tools":
            return (PlannedRequest("/chat/completions", body | {"tools": [_TOOL], "tool_choice": "required"}),)
        return (PlannedRequest("/chat/completions", body | {"response_format": _SCHEMA}),)

    def _turns(self, source: random.Random) -> Iterator[PlannedRequest]:
        prompt = self._ids(random.Random(f"{self.seed}/shared"), self.shared_len)
        for _ in range(self.turns):
            prompt = prompt + self._ids(source, self.input_len.draw(source))
            max_tokens = self.output_len.draw(source)
            yield completion(prompt, max_tokens)
            prompt = prompt + self._ids(source, max_tokens)  # in place of the answer, which is not known yet

    def _traced(self, row: TraceRow, number: int, run: int) -> PlannedRequest:
        """Returns the request of a row; rows of one run share the blocks that they have in common."""
        ids: list[int] = []
        for block in row.blocks:
            ids += self._ids(random.Random(f"{self.seed}/{run}/block/{block}"), TRACE_BLOCK)
        if len(ids) < row.input_len:
            ids += self._ids(random.Random(f"{self.seed}/{number}"), row.input_len - len(ids))
        return completion(ids[: row.input_len], max(1, row.output_len))

    def _ids(self, source: random.Random, count: int) -> list[int]:
        # One by one, ids would take microseconds each, in which the client reads no arrivals: 50 ms for 8,192.
        return source.choices(range(self.token_ids.low, self.token_ids.high + 1), k=count)


def completion(prompt: list[int] | str, max_tokens: int) -> PlannedRequest:
    """Returns a request for exactly `max_tokens` tokens: the model's end-of-sequence token is ignored."""
    return PlannedRequest("/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})
