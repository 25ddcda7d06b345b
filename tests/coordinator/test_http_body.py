"""Large bodies: their entries are counted before they are read, and parsing them does not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.errors import InvalidRequest, Unavailable
from baton.runtime import json_body
from baton.runtime.process import NICE, kill_child, ready, start_child
from coordinator.http import app as http_app
from coordinator.http import body as http_body
from coordinator.http.body import INLINE_BYTES, BodyParser
from coordinator.openai import schema as openai_schema
from coordinator.openai import validation
from coordinator.openai.responses import ResponsesBody
from tests.support.called_in_child import hang, pid_of
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

HANG_S = 10.0
JSON = {"content-type": "application/json"}
LARGE = b"x" * (INLINE_BYTES + 1)
# Every entry is invalid in itself, so the message shows whether an entry was read.
TOO_MANY: list[tuple[str, Any, int]] = [
    ("stop", [None] * 65, 64),
    ("logit_bias", {f"x{i}": None for i in range(301)}, 300),
    ("stop_token_ids", [None] * 65, 64),
    ("bad_words", [None] * 65, 64),
    ("metadata", {f"k{i}": None for i in range(17)}, 16),
    ("messages", [None] * 4_097, 4_096),
    ("guided_choice", [None] * 4_097, 4_096),
]


# A body of 4 MiB has room for these. The event loop unpickles what the process that parsed it returns.
_MANY = [[1]] * 600_000
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
MANY_VALUES: dict[str, tuple[type[validation.Strict], dict[str, Any]]] = {
    "tools": (
        openai_schema.ChatBody,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": _MANY}}}]},
    ),
    "schema": (
        openai_schema.ChatBody,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": _MANY}}}},
    ),
    "structured_outputs": (openai_schema.ChatBody, {"structured_outputs": {"json": {"enum": _MANY}}}),
    "chat_template_kwargs": (openai_schema.ChatBody, {"chat_template_kwargs": {"x": _MANY}}),
    "arguments": (
        openai_schema.ChatBody,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [_CALL | {"function": {"name": "f", "arguments": json.dumps({"x": _MANY})}}],
                }
            ]
        },
    ),
    "calls": (openai_schema.ChatBody, {"messages": [{"role": "assistant", "tool_calls": [_CALL] * 60}] * 450}),
}


def test_json_path_of_a_string_is_built_only_when_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of megabytes, in a path that was built for each string of a list, took minutes."""
    made: list[object] = []
    path = json_body._path
    monkeypatch.setattr(json_body, "_path", lambda place: made.append(place) or path(place))
    key = "k" * 1000
    good = {"prompt": ["\U0001f600", *[""] * 1000], "user": key, "metadata": {key: "\U0001f600"}}
    json_body.parse_object(json.dumps(good).encode())
    assert not made
    for bad, param in (({key: ["", "\0"]}, f"{key[:100]}[1]"), ({"a": [{"b": "\ud800"}]}, "a[0].b"), ({"\0": 1}, None)):
        with pytest.raises(InvalidRequest) as refused:
            json_body.parse_object(json.dumps(bad).encode())
        assert refused.value.param == param
    assert len(made) == 3


class BlockingParse:
    """A parse function that blocks until `go` is set. `most` is the largest number of bodies in it at the same time."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.inside = self.most = 0

    def __call__(self, body: bytes) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.begun.set()
        assert self.go.wait(HANG_S)
        self.inside -= 1
        return len(body)


def thread_parser() -> BodyParser:
    return BodyParser(lambda: ThreadPoolExecutor(1))


@pytest.mark.parametrize(("name", "entries", "most"), TOO_MANY, ids=[name for name, *_ in TOO_MANY])
def test_entries_are_counted_before_they_are_validated(name: str, entries: Any, most: int) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {most} entries, not {most + 1}") as refused:
        validation.parse(openai_schema.ChatBody, json.dumps(GOOD[CHAT] | {name: entries}).encode())
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("model", "field", "extra"),
    [
        (openai_schema.DetokenizeBody, "tokens", {}),
        (openai_schema.CompletionBody, "allowed_token_ids", {"prompt": "a"}),
        (openai_schema.CompletionBody, "guided_choice", {"prompt": "a"}),
    ],
)
def test_list_validation_stops_at_the_first_invalid_entry(
    model: type[validation.Strict], field: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    refusal = validation._refusal
    monkeypatch.setattr(validation, "_refusal", lambda e, path: counts.append(e.error_count()) or refusal(e, path))
    with pytest.raises(InvalidRequest, match=r"must be an integer|must be a string") as refused:
        validation.parse(model, json.dumps({field: [None] * 100, **extra}).encode())
    assert (counts, refused.value.param) == ([1], f"{field}[0]")


@pytest.mark.parametrize("end", [b"", b"["], ids=["json", "not json"])
def test_garbage_collection_is_suspended_while_json_is_parsed(end: bytes) -> None:
    collections: list[str] = []

    def seen(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    body = b'{"prompt":[' + b"[]," * 100_000 + b"[]]}" + end
    gc.callbacks.append(seen)
    try:
        with pytest.raises(InvalidRequest):
            validation.parse(openai_schema.CompletionBody, body)
    finally:
        gc.callbacks.remove(seen)
    assert gc.isenabled()
    assert collections.count("start") <= 2


@pytest.mark.parametrize("name", MANY_VALUES)
async def test_body_with_too_many_values_to_unpickle_is_refused_by_the_parser(name: str) -> None:
    model, more = MANY_VALUES[name]
    body = json.dumps(({} if model is ResponsesBody else GOOD[CHAT]) | more).encode()
    parser = thread_parser()
    with pytest.raises(InvalidRequest, match=r"more than 100,000 values|at most 20000 values"):
        await parser.parse(partial(validation.parse, model), body)
    parser.close()


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (openai_schema.CompletionBody, "prompt"),
        (openai_schema.DetokenizeBody, "tokens"),
        (openai_schema.CompletionBody, "allowed_token_ids"),
    ],
)
def test_a_million_token_ids_are_pickled_as_one_value(model: type[validation.Strict], field: str) -> None:
    extra = {"prompt": "a"} if field == "allowed_token_ids" else {}
    parsed = validation.parse(model, json.dumps({**extra, field: list(range(1000)) * 1000}).encode())
    pickled = pickle.dumps(parsed)
    assert sum(1 for _ in pickletools.genops(pickled)) < 1000
    found = getattr(pickle.loads(pickled), field)
    assert list(found[0] if field == "prompt" else found)[-2:] == [998, 999]


@pytest.mark.parametrize("length", [INLINE_BYTES // 2, 2 * INLINE_BYTES])
async def test_large_and_small_bodies_are_parsed_identically(client: httpx.AsyncClient, length: int) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "a", "user": 5, "model": "m" * length})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")
    assert (await client.post(COMPLETIONS, content=b"[" * length, headers=JSON)).json()["error"][
        "code"
    ] == "invalid_json"
    padded = json.dumps(GOOD[COMPLETIONS]).encode() + b" " * length
    assert (await client.post(COMPLETIONS, content=padded, headers=JSON)).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_requests_are_answered_while_a_large_body_is_parsed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, go = threading.Event(), threading.Event()

    def parse(model: type, body: bytes, *, strict: bool) -> None:
        begun.set()
        if not go.wait(HANG_S):
            raise AssertionError("the event loop stood still")
        raise InvalidRequest("held", param="held")

    monkeypatch.setattr(http_app, "parse", parse)
    monkeypatch.setattr(http_body, "start_child", lambda *_: ThreadPoolExecutor(1))
    large = asyncio.create_task(client.post(path, content=LARGE, headers=JSON))
    try:
        assert await asyncio.wait_for(asyncio.to_thread(begun.wait, HANG_S), HANG_S)
        assert (await client.get("/health")).status_code == 200
        assert not large.done()
    finally:
        go.set()
    assert (await large).json()["error"]["param"] == "held"


async def test_large_bodies_are_parsed_one_at_a_time() -> None:
    parser, held = thread_parser(), BlockingParse()
    waiting = [asyncio.create_task(parser.parse(held, LARGE)) for _ in range(3)]
    assert await asyncio.to_thread(held.begun.wait, HANG_S)
    assert await parser.parse(len, b"small") == 5
    held.go.set()
    assert await asyncio.gather(*waiting) == [len(LARGE)] * 3
    assert held.most == 1


async def test_too_many_large_bodies_are_refused_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "MAX_WAITING_BYTES", 2 * len(LARGE))
    parser, held = thread_parser(), BlockingParse()
    waiting = [asyncio.create_task(parser.parse(held, LARGE)) for _ in range(2)]
    assert await asyncio.to_thread(held.begun.wait, HANG_S)
    with pytest.raises(Unavailable, match="too many large bodies"):
        await parser.parse(held, LARGE)
    assert await parser.parse(len, b"small") == 5
    held.go.set()
    await asyncio.gather(*waiting)
    larger_than_all = LARGE * 3
    assert await parser.parse(held, larger_than_all) == len(larger_than_all)


@pytest.fixture(autouse=True)
def child_of_full_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests a child that yields to all of them may not start within PARSE_S."""
    monkeypatch.setattr(http_body, "start_child", partial(start_child, nice=0))


def parser_without_schemas() -> BodyParser:
    """For tests of its child, which starts in a third of the time."""
    return BodyParser(lambda: start_child(import_module, "json", nice=0))


def refuse(body: bytes) -> None:
    raise InvalidRequest("no", code="some_code", param="field")


async def test_large_bodies_are_parsed_in_a_child_process() -> None:
    """A parser on a thread would hold the GIL and so block the event loop."""
    parser = BodyParser()
    assert await parser.parse(pid_of, b"small") == os.getpid()
    child = await parser.parse(pid_of, LARGE)
    assert child != os.getpid() and await parser.parse(pid_of, LARGE) == child
    with pytest.raises(InvalidRequest, match="no") as refused:
        await parser.parse(refuse, LARGE)
    assert (refused.value.code, refused.value.param) == ("some_code", "field")


START_S = 60.0


def keep_nice(file: Path) -> None:
    file.write_text(str(os.nice(0)))


def test_a_child_yields_only_once_it_has_imported(tmp_path: Path) -> None:
    """Where no core is idle, a child that yielded first did not start within PARSE_S."""
    child = start_child(keep_nice, tmp_path / "nice")
    try:
        assert child.submit(os.nice, 0).result(START_S) == os.nice(0) + NICE
        assert (tmp_path / "nice").read_text() == str(os.nice(0))
    finally:
        kill_child(child)


def test_a_child_imports_the_schemas_before_the_first_body() -> None:
    parser = BodyParser()
    try:
        parser.started().submit(ready).result(START_S)
        child = parser.started().submit(os.getpid).result(START_S)
        assert "pydantic_core" in Path(f"/proc/{child}/maps").read_text()
    finally:
        parser.close()


async def test_a_child_that_is_killed_is_replaced() -> None:
    parser = parser_without_schemas()
    child = await parser.parse(pid_of, LARGE)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(Unavailable, match="crashed or timed out"):
        while await asyncio.wait_for(parser.parse(pid_of, LARGE), HANG_S) == child:
            pass
    assert await parser.parse(pid_of, LARGE) not in (child, os.getpid())


async def test_a_child_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "PARSE_S", HANG_S)
    parser = parser_without_schemas()
    child = await parser.parse(pid_of, LARGE)
    monkeypatch.setattr(http_body, "PARSE_S", 0.2)
    hanging = asyncio.create_task(parser.parse(hang, LARGE))
    await asyncio.sleep(0.1)
    behind = asyncio.create_task(parser.parse(pid_of, LARGE))
    for task in (hanging, behind):  # refused; a cancellation would mean that the client left
        with pytest.raises(Unavailable, match="crashed or timed out"):
            await asyncio.wait_for(task, HANG_S)
    await until_exited(child)
    monkeypatch.setattr(http_body, "PARSE_S", HANG_S)
    assert await parser.parse(pid_of, LARGE) != child


async def test_closing_the_parser_ends_the_child_process() -> None:
    parser = parser_without_schemas()
    child = await parser.parse(pid_of, LARGE)
    parser.close()
    await until_exited(child)
    parser.close()


async def until_exited(pid: int) -> None:
    async with asyncio.timeout(HANG_S):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has exited
            while "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                await asyncio.sleep(0.02)


def test_child_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Also a child whose parent dies before the child has requested the parent-death signal."""
    code = (
        "import asyncio, os, sys, threading\n"
        "from coordinator.http.body import BodyParser, INLINE_BYTES\n"
        "from tests.support.called_in_child import hang\n"
        "threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), 9)).start()\n"
        "asyncio.run(BodyParser().parse(hang, bytes(INLINE_BYTES + 1)))\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {os.getcwd()!r})\nif __name__ == '__main__':\n    "
        + "\n    ".join(code.splitlines())
    )
    for after_s in ("0.02", "0.3", "1.5"):
        parent = subprocess.Popen([sys.executable, str(script), after_s], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        parent.stdout.read()  # until no process has the pipe open
        assert parent.wait(HANG_S) == -signal.SIGKILL
