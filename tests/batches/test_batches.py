"""The files and batches API over a scripted generator: requests, results, limits, restarts."""

from __future__ import annotations

import asyncio
import encodings
import json
import multiprocessing
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from batches import routes as batch_routes
from batches import runner as batch_runner
from batches import store as batch_store
from batches import validation as batch_validation
from batches.runner import BatchRunner
from batches.store import BatchStore, Line
from baton.core.errors import QuotaExceeded, StartupError, Unavailable
from baton.runtime import disk
from baton.runtime.batches_access import Owner
from baton.runtime.json_body import parse_object
from baton.runtime.process import kill_child, start_child
from coordinator.api_keys import read_api_keys
from coordinator.http import batches as http_batches
from coordinator.http import server as http_server
from coordinator.openai import validation
from coordinator.submission import Delta, Sink, Submission, Timeline, Usage
from coordinator.text.model import TextModel
from tests.coordinator.test_api_keys import KEY, OTHER, key_file
from tests.support.batches_kit import Batches, official_client, with_batches
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import RawClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Echo(FakeGenerator):
    """Replies with the number of prompt tokens, `answers` times; later requests never end. Every answer waits for
    `hold`, if there is one. The first `refusals` requests are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.hold: asyncio.Event | None = None
        self.refusals, self.answers = 0, 10**6
        self.running = self.most_running = 0

    async def generate(self, submission: Submission, sink: Sink | None = None) -> AsyncGenerator[Delta, None]:
        self.submissions.append(submission)
        self._note()
        if self.refusals:
            self.refusals -= 1
            raise Unavailable("no room", retry_after_s=0)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            self.answers -= 1
            if self.answers < 0:
                await asyncio.Event().wait()
            if self.hold is not None:
                await self.hold.wait()
            count = len(submission.prompt)
            pooled = b"\0\0\x80?" if submission.pooling else b""
            yield Delta(f"{count}", (7,), "stop", usage=Usage(count, 1), timeline=Timeline(), pooled=pooled)
        finally:
            self.running -= 1


@asynccontextmanager
async def served(
    directory: Path, generator: Echo, text_model: TextModel, **more: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Batches]]:
    async with (
        with_batches(directory, generator, text_model, **more) as both,
        official_client(both.url, KEY) as client,
    ):
        yield client, both


def line(name: str, prompt: str = "Hello", path: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": path, "body": {"prompt": prompt, "max_tokens": 4} | more}


def jsonl(*lines: Any) -> bytes:
    return b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)


async def submit(client: openai.AsyncOpenAI, *lines: Any, endpoint: Any = COMPLETIONS) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"of": "tests"}
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(10):
        while (batch := await client.batches.retrieve(batch_id)).status not in (
            "completed",
            "failed",
            "cancelled",
            "expired",
        ):
            await asyncio.sleep(0.01)
    return batch


async def until_completed(client: openai.AsyncOpenAI, batch_id: str, lines: int) -> None:
    async with asyncio.timeout(10):
        while (await client.batches.retrieve(batch_id)).request_counts.completed < lines:
            await asyncio.sleep(0.01)


NO_OWNER = Owner()


def store_file(
    store: BatchStore,
    content: bytes = b"x",
    owner: Owner = NO_OWNER,
    name: str = "f",
) -> dict[str, Any]:
    """Adds an uploaded file to the store and returns its description."""
    part = store.new_part(owner, len(content))
    part.write_bytes(content)
    return store.add_file(owner, part, name, "batch")


async def rows_of(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_runs_every_line_and_writes_output_and_error_files(tmp_path: Path, text_model: TextModel) -> None:
    generator = Echo()
    async with served(tmp_path, generator, text_model) as (client, _):
        asked = [line(f"r{i}", "a" * (i + 1)) for i in range(5)]
        batch = await submit(client, *asked, b"", line("bad", temperature=9))
        assert batch.status == "validating" and batch.metadata == {"of": "tests"}
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.completed_at and batch.in_progress_at and batch.finalizing_at
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
        rows = await rows_of(client, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == [f"r{i}" for i in range(5)]
        for i, row in enumerate(rows):
            assert row["response"]["status_code"] == 200 and row["error"] is None
            assert row["response"]["body"]["choices"][0]["text"] == str(len(generator.submissions[i].prompt))
        (bad,) = await rows_of(client, batch.error_file_id)
        assert bad["custom_id"] == "bad" and bad["response"]["status_code"] == 400
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        assert {s.priority for s in generator.submissions} == {100}
        assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]


async def test_batches_serve_the_other_endpoints(tmp_path: Path, text_model: TextModel) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: messages,
        "/v1/responses": {"input": "hi"},
        "/v1/embeddings": {"input": "hi"},
        "/v1/score": {"text_1": "hi", "text_2": "ho"},
        "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    }
    async with served(tmp_path, Echo(), text_model) as (client, _):
        for endpoint, body in bodies.items():
            asked = {"custom_id": "x", "method": "POST", "url": endpoint, "body": body}
            batch = await ended(client, (await submit(client, asked, endpoint=endpoint)).id)
            (row,) = await rows_of(client, batch.output_file_id)
            assert row["response"]["status_code"] == 200, row


async def test_files_are_listed_read_and_deleted(tmp_path: Path, text_model: TextModel) -> None:
    async with served(tmp_path, Echo(), text_model) as (client, _):
        made = [await client.files.create(file=(f"{i}.jsonl", b"x" * i), purpose="batch") for i in (1, 2, 3)]
        assert [(f.filename, f.bytes, f.status) for f in made[:1]] == [("1.jsonl", 1, "processed")]
        assert [f.id async for f in client.files.list(limit=2)] == [f.id for f in reversed(made)]
        assert (await client.files.content(made[2].id)).content == b"xxx"
        assert (await client.files.delete(made[1].id)).deleted
        for call in (client.files.retrieve, client.files.delete, client.files.content):
            with pytest.raises(openai.NotFoundError):
                await call(made[1].id)
        assert (await client.files.list(purpose="batch_output")).data == []
        assert sorted(p.name for p in (tmp_path / "files").iterdir()) == sorted(f.id for f in (made[0], made[2]))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


WRONG = {
    b"{": ("invalid_json_line", None),
    b"[]": ("invalid_json_line", None),
    b'{"custom_id": 1}': ("missing_required_parameter", "custom_id"),
    b'{"custom_id": "r", "custom_id": "r"}': ("invalid_json_line", "custom_id"),
    json.dumps(line("r", metadata=nested(300))).encode(): ("invalid_value", "body"),
    json.dumps(line("r") | {"method": "GET"}).encode(): ("invalid_method", "method"),
    json.dumps(line("r") | {"url": CHAT}).encode(): ("mismatched_endpoint", "url"),
    json.dumps(line("r") | {"body": "x"}).encode(): ("missing_required_parameter", "body"),
    json.dumps(line("r") | {"costum_id": 1}).encode(): ("unknown_parameter", "costum_id"),
    json.dumps(line("good")).encode(): ("duplicate_custom_id", "custom_id"),
    json.dumps(line("r", stream=True)).encode(): ("invalid_value", "body.stream"),
}


async def test_an_invalid_line_fails_the_batch_with_its_line_number_and_field(
    tmp_path: Path, text_model: TextModel
) -> None:
    generator = Echo()
    async with served(tmp_path, generator, text_model) as (client, _):
        for text, (code, param) in WRONG.items():
            batch = await ended(client, (await submit(client, line("good"), text)).id)
            assert batch.status == "failed", text
            (error,) = batch.errors.data
            assert (error.code, error.line, error.param) == (code, 2, param), text
        batch = await ended(client, (await submit(client, b"")).id)
        assert batch.status == "failed" and batch.errors.data[0].code == "empty_file"
        assert not generator.submissions


async def test_ignored_fields_are_named_in_the_response_of_their_line(tmp_path: Path, text_model: TextModel) -> None:
    """Also those of the line itself, of a batch and of an upload; a database of an earlier version has no column."""
    (tmp_path / "files").mkdir()
    old = sqlite3.connect(tmp_path / "baton.db")
    schema = batch_store._SCHEMA.replace(" ignored text not null default '',", "")
    old.executescript(schema.replace(",\n    input_bytes integer not null default 0", ""))
    assert "input_bytes" not in [row[1] for row in old.execute("pragma table_info(batches)")]
    assert "ignored" not in [row[1] for row in old.execute("pragma table_info(lines)")]
    old.close()
    generator = Echo()
    async with served(tmp_path, generator, text_model) as (client, _):
        lines = line("a", rid="x", store=True), line("b") | {"priority": 1, "note": None}, line("c")
        made = await client.files.with_raw_response.create(
            file=("in.jsonl", jsonl(*lines)), purpose="batch", extra_body={"expires_after": "1d"}
        )
        assert made.headers["x-ignored-fields"] == "expires_after"
        batch = await client.batches.with_raw_response.create(
            input_file_id=made.parse().id,
            endpoint=COMPLETIONS,
            completion_window="24h",
            extra_body={"output_expires_after": {"seconds": 1}},
        )
        assert batch.headers["x-ignored-fields"] == "output_expires_after"
        rows = await rows_of(client, (await ended(client, batch.parse().id)).output_file_id)
        assert [row["response"].get("ignored_fields") for row in rows] == [["rid", "store"], ["line.priority"], None]
    assert {(path, name) for path, name in generator.ignored_fields} == {
        ("/v1/files", "expires_after"),
        ("/v1/batches", "output_expires_after"),
        (COMPLETIONS, "rid"),
        (COMPLETIONS, "store"),
    }


async def test_strict_fields_refuses_unknown_fields_of_lines_forms_and_batches(
    tmp_path: Path, text_model: TextModel
) -> None:
    async with served(tmp_path, Echo(), text_model, strict_fields=True) as (client, _):
        batch = await ended(client, (await submit(client, line("a") | {"priority": 1})).id)
        assert [(e.code, e.param) for e in batch.errors.data] == [("unknown_parameter", "priority")]
        with pytest.raises(openai.BadRequestError, match="unknown field 'expires_after'"):
            await client.files.create(file=("f", b"x"), purpose="batch", extra_body={"expires_after": "1d"})
        with pytest.raises(openai.BadRequestError, match="unknown field 'ttl'"):
            await client.batches.create(
                input_file_id="x", endpoint=COMPLETIONS, completion_window="24h", extra_body={"ttl": 1}
            )


async def test_running_requests_are_bounded_and_a_cancelled_batch_keeps_its_results(
    tmp_path: Path, text_model: TextModel
) -> None:
    generator = Echo()
    async with served(tmp_path, generator, text_model) as (client, _):
        generator.hold = asyncio.Event()
        batch = await submit(client, *(line(f"r{i}") for i in range(batch_runner.MAX_RUNNING + 9)))
        await generator.until(submitted=batch_runner.MAX_RUNNING)
        held, generator.hold = generator.hold, asyncio.Event()
        held.set()
        await generator.until(submitted=batch_runner.MAX_RUNNING + 9)
        await until_completed(client, batch.id, batch_runner.MAX_RUNNING)
        assert generator.most_running == batch_runner.MAX_RUNNING
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and generator.running == 0
        assert len(await rows_of(client, batch.output_file_id)) == batch_runner.MAX_RUNNING
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_resumes_after_a_restart_without_repeating_answered_lines(
    tmp_path: Path, text_model: TextModel
) -> None:
    first, answered = Echo(), 20
    first.answers = answered
    async with served(tmp_path, first, text_model) as (client, _):
        batch = await submit(client, *(line(f"r{i}", "a" * (i + 1)) for i in range(50)))
        await until_completed(client, batch.id, answered)
    second = Echo()
    async with served(tmp_path, second, text_model) as (client, _):
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == 50
        assert len(second.submissions) == 50 - answered
        rows = await rows_of(client, batch.output_file_id)
        assert [row["custom_id"] for row in rows] == [f"r{i}" for i in range(50)]


async def test_a_line_refused_as_unavailable_is_retried(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "RETRIES_S", (0.001, 0.002))
    generator = Echo()
    generator.refusals = 40
    async with served(tmp_path, generator, text_model) as (client, _):
        batch = await ended(client, (await submit(client, *(line(f"r{i}") for i in range(3)))).id)
        assert batch.request_counts.completed == 3 and len(generator.submissions) == 43


async def test_files_and_batches_of_another_tenant_are_not_found(tmp_path: Path, text_model: TextModel) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=b\n"))
    async with served(tmp_path / "data", Echo(), text_model, api_keys=keys) as (client, _):
        batch = await ended(client, (await submit(client, line("r"))).id)
        other = client.with_options(api_key=OTHER)
        assert (await other.files.list()).data == [] and (await other.batches.list()).data == []
        for call in (other.files.retrieve, other.files.delete, other.files.content):
            with pytest.raises(openai.NotFoundError):
                await call(batch.output_file_id)
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        with pytest.raises(openai.NotFoundError):
            await other.batches.list(after=batch.id)


async def test_oversized_or_malformed_uploads_and_batches_are_refused(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_routes, "_OVERHEAD_BYTES", 1000)
    empty = BatchStore(str(tmp_path), 1)
    pages, size = (empty._db.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "page_size"))
    empty.close()
    most = 12_000 + pages * size
    async with served(tmp_path, Echo(), text_model, max_file_bytes=5000, max_bytes=most) as (client, both):
        await client.files.create(file=("a", b"x" * 5000), purpose="batch")
        for size in (5001, 50_000):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.files.create(file=("a", b"x" * size), purpose="batch")
            assert refused.value.status_code == 413
        await client.files.create(file=("a", b"x" * 5000), purpose="batch")
        with pytest.raises(openai.RateLimitError, match=f"{most} bytes in total"):
            await client.files.create(file=("a", b"x" * 4900), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="'purpose' must be 'batch'"):
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        http = httpx.AsyncClient(base_url=both.url)
        kind = {"content-type": "multipart/form-data; boundary=x"}
        for headers, body, status in (
            ({"content-type": "application/json"}, b"{}", 415),
            (kind, b"", 400),
            (kind, b"--x\r\nnothing", 400),
            ({"content-type": "multipart/form-data"}, b"--x", 400),
            (kind, b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--', 400),
        ):
            answer = await http.post("/v1/files", content=body, headers=headers)
            assert answer.status_code == status and "error" in answer.json(), body
        assert [p for p in (tmp_path / "files").iterdir() if p.suffix == ".part"] == []
        for body, param in (
            ({"endpoint": COMPLETIONS, "completion_window": "24h"}, "input_file_id"),
            ({"input_file_id": "x", "endpoint": "/v1/images/generations", "completion_window": "24h"}, "endpoint"),
            ({"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "1h"}, "completion_window"),
        ):
            answer = await http.post("/v1/batches", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
        for path in ("/v1/files?limit=0", "/v1/batches?limit=101", "/v1/batches?limit=x"):
            assert (await http.get(path)).json()["error"]["param"] == "limit"
        await http.aclose()


async def test_only_utf_8_upload_forms_are_accepted(
    tmp_path: Path, text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Other charsets are refused: some Python codecs take quadratic time, and each name looked up stays cached."""

    def form(boundary: bytes, purpose: bytes) -> bytes:
        disposition = b"--%b\r\nContent-Disposition: form-data; name=" % boundary
        return (
            disposition
            + b'"purpose"\r\n\r\n%b\r\n' % purpose
            + disposition
            + b'"file"; filename="f\xff"\r\n\r\nx\r\n--%b--\r\n' % boundary
        )

    async with served(tmp_path, Echo(), text_model) as (_, both):
        http = httpx.AsyncClient(base_url=both.url)

        async def post(options: str, content: bytes) -> tuple[int, str | None]:
            kind = {"content-type": f"multipart/form-data; {options}"}
            answer = await http.post("/v1/files", content=content, headers=kind)
            return answer.status_code, answer.json().get("error", {}).get("param")

        for charset in ("punycode", "PunyCode", '"punycode"', "idna", "utf-7", "none-of-python", "", "a" * 5000):
            assert await post(f"boundary=x; charset={charset}", form(b"x", b"*" * 1000)) == (400, "content-type"), (
                charset
            )
        for options, boundary in (
            ("boundary=x; charset=UTF-8", b"x"),
            ("charset=utf8; boundary=x", b"x"),
            ("boundary=x; charset*=punycode''x", b"x"),
            (r'boundary="a;\"\\ b"', rb'a;"\ b'),
        ):
            assert await post(options, form(boundary, b"batch")) == (200, None), options
        assert await post("boundary=x", form(b"x", b"\xff")) == (400, "purpose")
        assert "none_of_python" not in encodings._cache and not caplog.records
        await http.aclose()


async def test_an_oversized_create_batch_body_is_refused_before_it_is_parsed(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is parsed on the event loop, so a larger body is refused unparsed, whether or not its length is declared."""
    parsed: list[int] = []

    def parse(model: Any, body: bytes, **more: Any) -> Any:
        parsed.append(len(body))
        return validation.parse(model, body, **more)

    monkeypatch.setattr(http_batches, "parse", parse)
    most = 64 * 1024
    assert most == http_batches.MAX_BODY_BYTES
    known = {"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    fits = json.dumps(known).encode().ljust(most)

    async def undeclared(body: bytes) -> AsyncIterator[bytes]:
        yield body[:1000]
        yield body[1000:]

    kind = {"content-type": "application/json"}
    async with served(tmp_path, Echo(), text_model) as (_, both):
        http = httpx.AsyncClient(base_url=both.url)
        for body, status in ((fits, 404), (fits + b" ", 413), (b'{"a":['.ljust(4 << 20, b"["), 413)):
            for content in (body, undeclared(body)):
                answer = await http.post("/v1/batches", content=content, headers=kind)
                assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == "request_too_large" and str(most) in answer.text
        assert parsed == [most, most]
        await http.aclose()
        raw = await RawClient.connect(both.server)
        head = f"POST /v1/batches HTTP/1.1\r\nHost: t\r\nContent-Length: {most + 1}\r\n"
        await raw.send(f"{head}Content-Type: application/json\r\n\r\n".encode())
        async with asyncio.timeout(10):
            assert b" 413 " in await raw.reader.readline(), "nothing of it has to come"
        await raw.close()


async def test_a_line_over_the_length_limit_is_not_parsed(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_LINE_BYTES", 1000)
    async with served(tmp_path, Echo(), text_model) as (client, _):
        batch = await ended(client, (await submit(client, line("a"), line("b", "x" * 5000), line("c"), b"{")).id)
        errors = [(error.line, error.code) for error in batch.errors.data]
        assert batch.status == "failed" and errors == [(2, "line_too_long"), (4, "invalid_json_line")]


async def test_a_batch_cancelled_before_it_begins_stays_cancelled(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path), 1 << 20)
    batch = store.add_batch(Owner(), COMPLETIONS, store_file(store)["id"], {})
    store.cancel("", batch["id"])
    assert not store.add_lines(batch["id"], [Line(batch["id"], 1, "a", b"{}")])
    store.begin(batch["id"])
    assert store.batch("", batch["id"])["status"] == "cancelling"
    store.end(batch["id"], "cancelled")
    assert store.batch("", batch["id"])["status"] == "cancelled" and store.unfinished() == []
    store.close()


async def test_a_batch_whose_input_file_was_deleted_fails_with_that_reason(
    tmp_path: Path, text_model: TextModel
) -> None:
    async with served(tmp_path, Echo(), text_model) as (client, both):
        store = both.store
        file = await client.files.create(file=("a", jsonl(line("a"))), purpose="batch")
        batch = store.add_batch(Owner(), COMPLETIONS, file.id, {})
        await client.files.delete(file.id)
        both.runner.wake()
        found = await ended(client, batch["id"])
        assert found.status == "failed" and "its input file was deleted" in found.errors.data[0].message


async def test_storage_failures_delay_a_batch_but_lose_no_result(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner pauses between two tries, clients get 503, and every line has a result in the end."""
    monkeypatch.setattr(disk, "PAUSE_S", 0.05)
    async with served(tmp_path, Echo(), text_model) as (client, both):
        store, tries, failing = both.store, 0, {"answered"}
        answered, unfinished = store.answered, store.unfinished

        def fails(*what: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries > 3 and "answered" in failing:
                raise sqlite3.OperationalError("disk I/O error")
            return answered(*what)

        store.answered = fails
        batch = await submit(client, *(line(f"r{i}") for i in range(8)))
        async with asyncio.timeout(10):
            while tries < 8:
                await asyncio.sleep(0.01)
        before = tries
        await asyncio.sleep(0.5)
        assert tries - before < 11 * 8, "a pause between two tries"
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"

        def broken(*what: Any) -> Any:
            if "unfinished" in failing:
                raise sqlite3.DatabaseError("malformed")
            return unfinished(*what)

        failing.add("unfinished")
        store.unfinished = broken
        both.runner.wake()
        await asyncio.sleep(0.1)
        failing.clear()
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == 8
        assert len(await rows_of(client, batch.output_file_id)) == 8

        failing.add("unfinished")
        monkeypatch.setattr(store, "files", lambda *_: broken())
        with pytest.raises(openai.InternalServerError, match="cannot be read or written") as refused:
            await client.files.list()
        assert refused.value.status_code == 503 and refused.value.code == "storage_failed"


def test_a_data_directory_is_used_by_only_one_process(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path), 1)
    with pytest.raises(StartupError, match="in use by another process"):
        BatchStore(str(tmp_path), 1)
    store.close()
    BatchStore(str(tmp_path), 1).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"--data-dir .* cannot be used"):
        BatchStore(str(tmp_path / "file"), 1)


async def test_a_download_whose_client_does_not_read_is_closed(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.3)
    async with served(tmp_path, Echo(), text_model, max_file_bytes=32 << 20, max_bytes=64 << 20) as (client, both):
        file = await client.files.create(file=("a", b"x" * (24 << 20)), purpose="batch")
        raw = await RawClient.connect_without_reading(both.server)
        await raw.send(f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        await asyncio.sleep(0.8)
        raw.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await raw.closed()
        assert len((await client.files.content(file.id)).content) == 24 << 20


async def test_concurrent_downloads_are_limited_per_owner_and_in_total(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Downloads are limited per owner and in total; one that is not read frees its slot when its client leaves."""
    monkeypatch.setattr(batch_routes, "MAX_DOWNLOADS", 2)
    monkeypatch.setattr(batch_routes, "MAX_DOWNLOADS_OF_OWNER", 1)
    third = "sk-third-0123456789abcdef"
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=b\n{third} tenant=c\n"))
    more: dict[str, Any] = {"api_keys": keys, "max_file_bytes": 8 << 20, "max_bytes": 64 << 20}
    async with served(tmp_path / "data", Echo(), text_model, **more) as (client, both):
        clients = [client.with_options(api_key=key) for key in (KEY, OTHER, third)]
        files = [await each.files.create(file=("a", b"x" * (4 << 20)), purpose="batch") for each in clients]
        held = []
        for key, file in zip((KEY, OTHER), files, strict=False):
            held.append(await RawClient.connect_without_reading(both.server))
            head = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {key}\r\n\r\n"
            await held[-1].send(head.encode())
        downloads = both.routes._downloads
        async with asyncio.timeout(5):
            while downloads.taken.total() < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="1 of your files are already being downloaded"):
            await client.files.content(files[0].id)
        with pytest.raises(openai.InternalServerError, match="2 files are already being downloaded") as full:
            await clients[2].files.content(files[2].id)
        assert full.value.status_code == 503 and full.value.response.headers["retry-after"] == "5"
        for each in held:
            await each.close()
        async with asyncio.timeout(5):
            while downloads.taken:
                await asyncio.sleep(0.01)
        assert len((await client.files.content(files[0].id)).content) == 4 << 20


async def test_a_download_is_sent_in_small_chunks(tmp_path: Path, text_model: TextModel) -> None:
    sizes, never = list[int](), asyncio.Event()

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))

    async with served(tmp_path, Echo(), text_model, max_bytes=4 << 20) as (client, both):
        file = await client.files.create(file=("a", b"x" * (1 << 20)), purpose="batch")
        path = f"/v1/files/{file.id}/content"
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"t")], "query_string": b""}
        await both.app(scope, never.wait, send)  # type: ignore[arg-type]
    assert sum(sizes) == 1 << 20 and max(sizes) <= 32 * 1024


async def test_concurrent_uploads_are_limited(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_routes, "MAX_UPLOADS", 1)
    async with served(tmp_path, Echo(), text_model) as (client, both):
        slow = await RawClient.connect(both.server)
        head = "POST /v1/files HTTP/1.1\r\nHost: t\r\nContent-Length: 999\r\n"
        await slow.send(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
        routes = both.routes
        async with asyncio.timeout(5):
            while not routes._uploads.taken:
                await asyncio.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="1 files are already being uploaded"):
            await client.files.create(file=("a", b"x"), purpose="batch")
        await slow.close()
        async with asyncio.timeout(5):
            while True:
                try:
                    await client.files.create(file=("a", b"x"), purpose="batch")
                    break
                except openai.InternalServerError:
                    await asyncio.sleep(0.01)


async def test_the_uploads_of_one_key_leave_room_for_others(tmp_path: Path, text_model: TextModel) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=b\n"))
    async with served(tmp_path / "data", Echo(), text_model, api_keys=keys) as (client, both):
        slow = [await RawClient.connect(both.server) for _ in range(batch_routes.MAX_UPLOADS)]
        head = f"POST /v1/files HTTP/1.1\r\nHost: t\r\nContent-Length: 999\r\nAuthorization: Bearer {KEY}\r\n"
        for each in slow:
            await each.send(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
        for each in slow[2:]:
            code, headers, body = await each.answer()
            assert code == 429 and headers["retry-after"] == "5"
            assert b"2 of your files are already being uploaded" in body
        with pytest.raises(openai.RateLimitError):
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert await client.with_options(api_key=OTHER).files.create(file=("a", b"x"), purpose="batch")
        for each in slow:
            await each.close()
        async with asyncio.timeout(5):
            while both.routes._uploads.taken:
                await asyncio.sleep(0.01)


async def test_a_slow_upload_times_out_and_a_steady_one_does_not(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_routes, "UPLOAD_GRACE_S", 0.5)
    monkeypatch.setattr(batch_routes, "UPLOAD_BYTES_S", 10_000)
    head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def form(piece: bytes, pieces: int) -> AsyncIterator[bytes]:
        yield head
        for _ in range(pieces):
            await asyncio.sleep(0.01)
            yield piece
        yield b"\r\n--x--\r\n"

    async def drip(client: RawClient) -> None:
        async for piece in form(b"x", 10**6):
            await client.send(piece)

    kind = {"content-type": "multipart/form-data; boundary=x"}
    async with served(tmp_path, Echo(), text_model) as (_, both):
        slow = await RawClient.connect(both.server)
        await slow.send(
            b"POST /v1/files HTTP/1.1\r\nHost: t\r\nContent-Length: 99999\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        )
        sending = asyncio.create_task(drip(slow))
        status, _, body = await slow.answer()
        assert status == 408 and b"10000 bytes per second" in body
        sending.cancel()
        await slow.close()
        http = httpx.AsyncClient(base_url=both.url)
        answer = await http.post("/v1/files", content=form(b"x" * 1000, 100), headers=kind)
        assert answer.status_code == 200 and answer.json()["bytes"] == 100_000
        await http.aclose()


def test_the_data_directory_is_accessible_only_to_its_os_user(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path / "data"), 1 << 20)
    store_file(store)
    kept = [tmp_path / "data", *(tmp_path / "data").glob("baton*"), tmp_path / "data" / "files"]
    assert {path.name for path in kept} >= {"baton.db", "baton.db-wal", "files"}
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
    store.close()


def test_a_failed_add_leaves_neither_a_file_nor_a_row(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path), 1 << 20)
    assert store_file(store, name="a\ud800b")["filename"] == "a?b"
    with pytest.raises(FileNotFoundError):
        store.add_file(Owner(), tmp_path / "files" / "none.part", "f", "batch")
    gone = store.new_part(Owner(), 1)
    gone.write_bytes(b"x")
    with pytest.raises(sqlite3.Error):
        store.add_file(Owner(), gone, "f", None)  # type: ignore[arg-type]
    assert len(store.files("", 10, None, None)) == 1 and len(list((tmp_path / "files").glob("file-*"))) == 1
    store.close()


async def test_a_batch_counts_against_the_quota_of_its_key(tmp_path: Path, text_model: TextModel) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} name=search tenant=acme priority=3 requests_at_once=2\n"))
    generator = Echo()
    async with served(tmp_path / "data", generator, text_model, api_keys=keys) as (client, _):
        await ended(client, (await submit(client, line("r"))).id)
    (submission,) = generator.submissions
    assert submission.client == replace(keys.client(f"Bearer {KEY}"), priority=100) and submission.priority == 100


async def test_a_batch_whose_key_was_removed_fails_and_keeps_its_results(tmp_path: Path, text_model: TextModel) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=acme\n{OTHER} tenant=acme\n"))
    left = read_api_keys(key_file(tmp_path, f"{OTHER} tenant=acme\n"))
    first = Echo()
    first.answers = 1
    async with served(tmp_path / "data", first, text_model, api_keys=keys) as (client, _):
        batch = await submit(client, line("a"), line("b"))
        await until_completed(client, batch.id, 1)
    async with served(tmp_path / "data", Echo(), text_model, api_keys=left) as (client, _):
        other = client.with_options(api_key=OTHER)
        batch = await ended(other, batch.id)
        assert batch.status == "failed" and "no longer exists" in batch.errors.data[0].message
        assert len(await rows_of(other, batch.output_file_id)) == 1, "what it has is kept"


async def test_owners_take_turns_and_a_batch_that_has_not_begun_is_cancelled_immediately(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_BATCHES", 2)
    keys = read_api_keys(key_file(tmp_path, f"{KEY} tenant=a\n{OTHER} tenant=b\n"))
    generator = Echo()
    generator.hold = asyncio.Event()
    async with served(tmp_path / "data", generator, text_model, api_keys=keys) as (client, both):
        store, made = both.store, []
        for owner, count in (("a", 4), ("b", 2)):
            for _ in range(count):
                file = store_file(store, jsonl(line("r")), Owner(owner))
                key = keys.client(f"Bearer {KEY if owner == 'a' else OTHER}").key
                made.append(store.add_batch(Owner(owner, key), COMPLETIONS, file["id"], {})["id"])
        assert [batch["owner"] for batch in store.unfinished()] == ["a", "b", "a", "b", "a", "a"]
        both.runner.wake()
        await generator.until(submitted=2)
        assert sorted(s.client.tenant for s in generator.submissions) == ["a", "b"]
        await client.batches.cancel(made[3])
        assert (await ended(client, made[3])).status == "cancelled"
        generator.hold.set()
        assert (await ended(client, made[2])).status == "completed"


async def test_chunked_uploads_over_the_storage_limit_and_cross_origin_uploads_are_refused(
    tmp_path: Path, text_model: TextModel
) -> None:
    """A chunked upload over the storage limit leaves no file; a cross-origin upload is refused with 403."""
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 300_000 + b"\r\n--x--\r\n"

    async def chunks() -> AsyncIterator[bytes]:
        yield form

    kind = {"content-type": "multipart/form-data; boundary=x"}
    async with served(tmp_path, Echo(), text_model, max_bytes=200_000) as (client, both):
        http = httpx.AsyncClient(base_url=both.url)
        answer = await http.post("/v1/files", content=chunks(), headers=kind)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "storage_full"
        assert list((tmp_path / "files").iterdir()) == [] and (await client.files.list()).data == []
        for origin, status in (("https://evil.example", 403), ("null", 403), (both.url, 429)):
            refused = await http.post("/v1/files", content=form, headers=kind | {"origin": origin})
            assert refused.status_code == status, origin
        await http.aclose()


def test_unfinished_batches_are_limited_per_owner_and_in_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished batches are limited per owner and in total; one that ends makes room. A refused one leaves no row."""
    monkeypatch.setattr(batch_store, "MAX_UNFINISHED_OF_OWNER", 2)
    monkeypatch.setattr(batch_store, "MAX_UNFINISHED", 3)
    store = BatchStore(str(tmp_path), 1 << 20)
    files = {owner: store_file(store, owner=Owner(owner))["id"] for owner in ("a", "b")}

    def add(owner: str) -> Any:
        return store.add_batch(Owner(owner), COMPLETIONS, files[owner], {})["id"]

    first, second = add("a"), add("a")
    with pytest.raises(QuotaExceeded, match="2 batches are unfinished: cancel one or wait") as refused:
        add("a")
    assert refused.value.code == "too_many_batches" and refused.value.retry_after_s
    add("b")
    with pytest.raises(Unavailable, match="3 batches of all clients are unfinished") as full:
        add("b")
    assert full.value.code == "too_many_batches" and full.value.retry_after_s
    store.cancel("a", first)
    with pytest.raises(QuotaExceeded):
        add("a")
    store.end(first, "cancelled")
    third = add("a")
    assert [batch["id"] for batch in store.batches("a", 10, None)] == [third, second, first]
    assert len(store.batches("b", 10, None)) == 1
    store.close()


def test_a_batch_that_would_exceed_the_storage_limit_is_refused(tmp_path: Path) -> None:
    """A batch stores a copy of the lines of its file, and its metadata."""
    store = BatchStore(str(tmp_path), 1 << 20)
    file, small = store_file(store, b"x" * 450_000)["id"], store_file(store)["id"]
    assert store.add_batch(Owner(), COMPLETIONS, file, {})["status"] == "validating"
    store_file(store, b"x" * 200_000)
    for wanted, metadata in ((file, {}), (small, {"k": "x" * 400_000})):
        with pytest.raises(QuotaExceeded, match="delete some") as refused:
            store.add_batch(Owner(), COMPLETIONS, wanted, metadata)
        assert refused.value.code == "storage_full"
    assert len(store.batches("", 10, None)) == 1
    assert store.add_batch(Owner(), COMPLETIONS, small, {})["status"] == "validating"
    store.close()


async def test_the_runner_reads_as_many_batches_as_it_may_start(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no more, however many exist. A batch that only has to be cancelled does not wait for earlier ones."""
    monkeypatch.setattr(batch_runner, "MAX_BATCHES", 2)
    generator = Echo()
    generator.hold = asyncio.Event()
    async with served(tmp_path, generator, text_model) as (client, both):
        store, read = both.store, list[int]()
        unfinished = store.unfinished

        def counted(*what: Any) -> Any:
            found = unfinished(*what)
            read.append(len(found))
            return found

        store.unfinished = counted
        made = [(await submit(client, line("r"))).id for _ in range(12)]
        await generator.until(submitted=2)
        await client.batches.cancel(made[-1])
        assert (await ended(client, made[-1])).status == "cancelled"
        generator.hold.set()
        for batch_id in made[:-1]:
            assert (await ended(client, batch_id)).status == "completed"
        assert len(read) >= 12 and max(read) <= 2 + 3, "two that run, one that is cancelled, and as many again"


def padded(given: dict[str, Any]) -> bytes:
    """Returns a line that is parsed in a child process if `INLINE_BYTES` is 1000."""
    return json.dumps(given).encode().replace(b'"body": ', b'"body": ' + b" " * 2000)


async def test_a_long_line_is_parsed_in_a_child_process(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing lists of 4 MiB holds the GIL for 0.2 s, on the store's thread too."""
    assert batch_validation.INLINE_BYTES == 64 * 1024
    monkeypatch.setattr(batch_validation, "INLINE_BYTES", 1000)
    here, children = list[int](), list[Executor]()

    def parse_here(text: bytes) -> Any:
        here.append(len(text))
        return parse_object(text)

    def start(*_: object) -> Executor:
        children.append(start_child())
        return children[-1]

    monkeypatch.setattr(batch_store, "parse_object", parse_here)
    monkeypatch.setattr(batch_validation, "start_child", start)
    before = multiprocessing.active_children()
    async with served(tmp_path, Echo(), text_model) as (client, _):
        batch = await ended(client, (await submit(client, line("a"), padded(line("b")), padded(line("c")))).id)
        assert [row["custom_id"] for row in await rows_of(client, batch.output_file_id)] == ["a", "b", "c"]
        assert len(here) == 1 and len(children) == 1
        wrong = (b'{"a": [' + b"[], " * 1000, padded(line("a", stream=True)), padded(line("a")))
        batch = await ended(client, (await submit(client, line("a"), *wrong)).id)
        found = [(error.line, error.code) for error in batch.errors.data]
        assert found == [(2, "invalid_json_line"), (3, "invalid_value"), (4, "duplicate_custom_id")]
        assert len(here) == 2 and max(here) < 1000 and len(children) == 1
    await until_children_exit(before)


async def no_answer(path: str, body: bytes, key: str) -> Any:
    raise AssertionError("no line is sent")


async def until_children_exit(before: list[Any]) -> None:
    """Waits until there are no child processes besides `before`."""
    async with asyncio.timeout(30):
        while set(multiprocessing.active_children()) - set(before):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("prepare", "value", "parse_s"), [(os._exit, 3, 30.0), (time.sleep, 1000, 0.1)])
async def test_a_parser_process_that_exits_or_hangs_fails_only_one_batch(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch, prepare: Any, value: int, parse_s: float
) -> None:
    before = multiprocessing.active_children()
    monkeypatch.setattr(batch_validation, "INLINE_BYTES", 1000)
    async with served(tmp_path, Echo(), text_model) as (client, _):
        with monkeypatch.context() as broken:
            broken.setattr(batch_validation, "start_child", lambda *_: start_child(prepare, value))
            broken.setattr(batch_validation, "PARSE_S", parse_s)
            batch = await ended(client, (await submit(client, line("a"), padded(line("b")))).id)
        assert batch.status == "failed" and batch.errors.data[0].code == "internal_error"
        await until_children_exit(before)
        batch = await ended(client, (await submit(client, line("a"), padded(line("b")))).id)
        assert batch.status == "completed"
    await until_children_exit(before)


async def test_shutdown_does_not_wait_for_a_line_that_is_being_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next coordinator validates the batch again."""
    monkeypatch.setattr(batch_validation, "INLINE_BYTES", 1000)
    monkeypatch.setattr(batch_validation, "PARSE_S", 1000)
    children = list[Executor]()

    def start(*_: object) -> Executor:
        children.append(start_child(time.sleep, 1000))
        return children[-1]

    monkeypatch.setattr(batch_validation, "start_child", start)
    before = multiprocessing.active_children()
    store = BatchStore(str(tmp_path), 1 << 20)
    store.add_batch(Owner(), COMPLETIONS, store_file(store, jsonl(line("a"), padded(line("b"))))["id"], {})
    runner = BatchRunner(store, no_answer)
    checked = asyncio.create_task(runner._validator.validate(store.unfinished()[0]))
    async with asyncio.timeout(30):
        while not set(multiprocessing.active_children()) - set(before):
            await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(30):
            await asyncio.to_thread(runner.close)
    finally:
        kill_child(children[0])
    with pytest.raises(Unavailable):
        await checked
    await until_children_exit(before)
    store = BatchStore(str(tmp_path), 1 << 20)
    (batch,) = store.unfinished()
    assert batch["status"] == "validating" and store.open_lines(batch["id"], 0, 9) == []
    store.close()
