"""The requests to send: prompts, lengths and due times, the same for the same seed. Pure, except for `read_trace`."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

_WORDS = """
    the of and to in is that for it was on are as with they be at one have this from by hot but some what there
    we can out other were all your when up use word how said an each she which do their time if will way about
    many then them would write like so these her long make thing see him two has look more day could go come did
    my
""".split()  # noqa: SIM905
Workload = Literal["tokens", "text", "turns", "tools", "schema"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
TRACE_BLOCK = 512
"""Tokens of a prefix block in Mooncake's traces."""
MOST_ROWS = 100_000
MOST_TOKENS = 10_000_000
"""Limit of the prompt, and of the output, of one request of a trace."""
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
class Lengths:
    """A fixed length, or a uniform distribution between two, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the path of the API, and the part of its body that the workload determines."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that one client sends one after the other. In an open loop the first is sent `at_s` seconds after the
    run began; each later one is sent when its predecessor has ended."""

    jobs: tuple[Job, ...]
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a recorded trace. `blocks` are the ids of its prefix blocks: equal ids mean equal tokens."""

    at_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """All requests of a run.

    tokens  random token ids, so that every server counts the same
    text    random words, as many as the input length
    turns   conversations of `turns` requests: each prompt is the previous one, random tokens for the answer and
            `input_len` new tokens, after `shared_len` tokens that all conversations start with
    tools   a chat that must call a function
    schema  a chat whose answer must match a JSON schema

    With `rate`, sessions start at random times, `rate` per second on average (a Poisson process). With a `trace`, its
    rows determine the times and lengths, replayed `scale` times as fast.
    """

    seed: int
    input_len: Lengths
    output_len: Lengths
    workload: Workload = "tokens"
    token_ids: Lengths = Lengths(300, 3999)
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
        origin = self.trace[0].at_s if self.trace else 0.0
        while left > 0:
            if self.trace:
                if number - first >= len(self.trace):
                    return
                row = self.trace[number - first]
                jobs: tuple[Job, ...] = (self._traced(row),)
                at_s = (row.at_s - origin) / self.scale
            else:
                jobs = self._jobs(number)[:left]
                at_s += due.expovariate(self.rate) if self.rate else 0.0
            yield Session(jobs, at_s)
            left -= len(jobs)
            number += 1

    def job(self, number: int) -> Job:
        """Returns the first request of session `number`."""
        return self._jobs(number)[0]

    def _jobs(self, number: int) -> tuple[Job, ...]:
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
            return (Job("/chat/completions", body | {"tools": [_TOOL], "tool_choice": "required"}),)
        return (Job("/chat/completions", body | {"response_format": _SCHEMA}),)

    def _turns(self, source: random.Random) -> Iterator[Job]:
        prompt = self._ids(random.Random(f"{self.seed}/shared"), self.shared_len)
        for _ in range(self.turns):
            prompt = prompt + self._ids(source, self.input_len.draw(source))
            max_tokens = self.output_len.draw(source)
            yield completion(prompt, max_tokens)
            prompt = prompt + self._ids(source, max_tokens)  # in place of the answer, which is not known yet

    def _traced(self, row: TraceRow) -> Job:
        ids: list[int] = []
        for block in row.blocks:
            ids += self._ids(random.Random(f"{self.seed}/block/{block}"), TRACE_BLOCK)
        if len(ids) < row.input_len:
            ids += self._ids(random.Random(f"{self.seed}/{row.at_s}/{row.input_len}"), row.input_len - len(ids))
        return completion(ids[: row.input_len], max(1, row.output_len))

    def _ids(self, source: random.Random, count: int) -> list[int]:
        return [self.token_ids.draw(source) for _ in range(count)]


def completion(prompt: list[int] | str, max_tokens: int) -> Job:
    """Returns a request for exactly `max_tokens` tokens: the model's end-of-sequence token is ignored."""
    return Job("/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})


def parse_lengths(text: str) -> Lengths:
    """Parses `512` or `128-1024`.

    Raises:
        ValueError: the text has neither form.
    """
    low, dash, high = text.partition("-")
    lengths = Lengths(int(low), int(high) if dash else int(low))
    if lengths.low < 0 or lengths.high < lengths.low:
        raise ValueError(f"{text!r} is neither a length nor a range")
    return lengths


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Reads the first MOST_ROWS rows of a trace in Mooncake's format (JSON lines) or Azure's (CSV), sorted by time.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has neither format; the message names the row.
    """
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".csv":
            rows = _numbered(csv.DictReader(file), _azure)
        else:
            rows = _numbered((json.loads(line) for line in file if line.strip()), _mooncake)
        found = list(itertools.islice(rows, MOST_ROWS))
    if not found:
        raise ValueError("the trace has no rows")
    return tuple(sorted(found, key=lambda row: row.at_s))


def _numbered(lines: Iterable[Any], parse: Any) -> Iterator[TraceRow]:
    number = 0
    try:
        for line in lines:
            yield parse(line)
            number += 1
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, csv.Error) as error:
        raise ValueError(f"row {number + 1} is not a trace row: {error!r}") from None


def _mooncake(row: dict[str, Any]) -> TraceRow:
    blocks: Sequence[int] = row.get("hash_ids", ())
    at_s = float(row["timestamp"]) / 1e3
    return _checked(TraceRow(at_s, int(row["input_length"]), int(row["output_length"]), tuple(map(int, blocks))))


def _azure(row: dict[str, str]) -> TraceRow:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26])
    seconds = at.timestamp() if at.tzinfo else (at - datetime(1970, 1, 1)).total_seconds()
    return _checked(TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])))


def _checked(row: TraceRow) -> TraceRow:
    if not math.isfinite(row.at_s):
        raise ValueError(f"invalid timestamp {row.at_s}")
    if not (1 <= row.input_len <= MOST_TOKENS and 0 <= row.output_len <= MOST_TOKENS):
        raise ValueError(f"{row.input_len} prompt tokens and {row.output_len} output tokens: out of range")
    if len(row.blocks) * TRACE_BLOCK > MOST_TOKENS:
        raise ValueError(f"too many prefix blocks: {len(row.blocks)}")
    return row
