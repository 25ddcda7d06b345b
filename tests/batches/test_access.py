"""The batches process and the coordinator: who may call whom, and what happens while one of them is away."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from batches import public_api
from batches import runner as batch_runner
from batches.public_api import PublicApi
from baton.core.errors import Unauthenticated
from baton.runtime.batches_access import HEADER, Owner, access_key, headers_for, owner_of
from coordinator.api_keys import read_api_keys
from coordinator.http.app import HttpSettings, create_app
from coordinator.text.model import TextModel
from tests.batches.test_batches import (
    COMPLETIONS,
    Echo,
    ended,
    line,
    rows_of,
    served,
    submit,
    until_completed,
)
from tests.coordinator.test_api_keys import KEY, OTHER, key_file
from tests.support.batches_kit import ACCESS_KEY
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import running

BODY = {"prompt": "hi", "max_tokens": 2}


def test_the_key_follows_from_the_cluster_token_alone() -> None:
    key = access_key("t" * 32)
    assert key == access_key("t" * 32) != access_key("u" * 32) and "t" * 8 not in key and access_key("") == ""
    owner = Owner("acme", "search", True)
    assert owner_of(headers_for(owner, key), key) == owner == owner_of(headers_for(owner, "any"), "")
    for headers in ({}, headers_for(owner, ""), headers_for(owner, key + "x"), {"authorization": f"Bearer {key}"}):
        with pytest.raises(Unauthenticated):
            owner_of(headers, key)


async def test_only_the_coordinator_is_served_by_the_batches_process(tmp_path: Path, text_model: TextModel) -> None:
    async with served(tmp_path, Echo(), text_model) as (client, both):
        await client.files.create(file=("a", b"x"), purpose="batch")
        async with httpx.AsyncClient(base_url=f"http://{both.address}") as direct:
            good = headers_for(Owner(), ACCESS_KEY)
            assert len((await direct.get("/v1/files?limit=9", headers=good)).json()["data"]) == 1
            for headers in ({}, headers_for(Owner(), "other"), {"authorization": good["authorization"]}):
                for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("DELETE", "/v1/files/x")):
                    answer = await direct.request(method, f"{path}?limit=9", headers=headers)
                    assert answer.status_code == 401 and "data" not in answer.text, (method, path)


async def test_a_client_cannot_act_for_another_key(tmp_path: Path, text_model: TextModel) -> None:
    """Neither with its own key, nor without any; nor can it choose another tenant on the way to its files."""
    keys = read_api_keys(key_file(tmp_path, f"{KEY} name=a tenant=a\n{OTHER} name=b tenant=b\n"))
    generator = Echo()
    async with served(tmp_path / "data", generator, text_model, api_keys=keys) as (client, both):
        await client.files.create(file=("a", b"x"), purpose="batch")
        async with httpx.AsyncClient(base_url=both.url) as http:
            named = {HEADER: json.dumps({"tenant": "a", "key": "a", "several_tenants": False})}
            for bearer in ({}, {"authorization": f"Bearer {OTHER}"}, {"authorization": "Bearer x"}):
                answer = await http.post(COMPLETIONS, json=BODY, headers=named | bearer)
                assert answer.status_code == 401, bearer
                assert (await http.get("/v1/files", headers=named | bearer)).status_code == 401
            real = headers_for(Owner(key="b"), ACCESS_KEY)
            assert (await http.post(COMPLETIONS, json=BODY, headers=real)).status_code == 200
    assert [(s.client.key, s.priority) for s in generator.submissions] == [("b", 100)]


@pytest.mark.parametrize("batches_key", [None, ""])
async def test_without_a_cluster_token_no_client_acts_for_a_key(
    tmp_path: Path, text_model: TextModel, batches_key: str | None
) -> None:
    """With keys and without a token the coordinator has no access key (None); without keys all clients are equal."""
    keys = read_api_keys(key_file(tmp_path, f"{KEY} name=a\n") if batches_key is None else "")
    app = create_app(FakeGenerator(), text_model, HttpSettings("tiny", api_keys=keys, batches_key=batches_key))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as http:
        answer = await http.post(COMPLETIONS, json=BODY, headers=headers_for(Owner(key="a"), ""))
    assert answer.status_code == (401 if batches_key is None else 200)


async def test_calls_are_answered_with_503_while_the_batches_process_is_away(
    tmp_path: Path, text_model: TextModel
) -> None:
    settings = HttpSettings("tiny", batches_address="127.0.0.1:1", batches_key="")
    app = create_app(FakeGenerator(), text_model, settings)
    async with running(app) as server:
        url = f"http://127.0.0.1:{server.address[1]}/v1"
        async with openai.AsyncOpenAI(api_key=KEY, base_url=url, max_retries=0) as client:
            for call in (
                client.files.list(),
                client.files.create(file=("a", b"x" * 500_000), purpose="batch"),
                client.files.content("file-1"),
                client.batches.create(input_file_id="x", endpoint=COMPLETIONS, completion_window="24h"),
            ):
                with pytest.raises(openai.InternalServerError, match="may be restarting") as refused:
                    await call
                assert refused.value.status_code == 503 and refused.value.code == "batches_unavailable"
                assert refused.value.response.headers["retry-after"] == "1"
    await app.state.close()


async def test_metrics_have_the_figures_of_the_batches_process(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "RETRIES_S", (0.01, 0.02))
    generator = Echo()
    generator.refusals = 1
    async with served(tmp_path, generator, text_model) as (client, both), httpx.AsyncClient(base_url=both.url) as http:
        await ended(client, (await submit(client, line("a"), line("b", max_tokens=0))).id)
        generator.hold = asyncio.Event()
        batch = await submit(client, line("c"))
        async with asyncio.timeout(10):
            while (figures := await both.runner.figures())["lines"]["running"] == 0:
                await asyncio.sleep(0.01)
        assert figures["lines"] == {"running": 1, "retries": 1, "answered": {"200": 1, "400": 1}}
        assert figures["unfinished"] == {"in_progress": 1} and 0 < figures["stored_bytes"] < figures["max_bytes"]
        assert (await http.get("/metrics")).text == f"# batches: {figures}\n"
        generator.hold.set()
        await ended(client, batch.id)

        async def fail() -> None:
            raise OSError("the disk is away")

        monkeypatch.setattr(both.runner, "figures", fail)
        assert (await http.get("/metrics")).text == "# batches: {}\n"


async def test_metrics_are_served_while_the_batches_process_is_away(text_model: TextModel) -> None:
    settings = HttpSettings("tiny", batches_address="127.0.0.1:1", batches_key="")
    app = create_app(FakeGenerator(), text_model, settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as http:
        assert (await http.get("/metrics")).text == "# batches: {}\n"
    await app.state.close()


async def test_batches_wait_while_the_coordinator_is_away_and_say_so_once(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it is away, no line fails."""
    monkeypatch.setattr(batch_runner, "RETRIES_S", (0.01, 0.02))
    caplog.set_level(logging.WARNING, "baton.batches")
    generator, tries = Echo(), 0
    async with served(tmp_path, generator, text_model) as (client, both):
        away = PublicApi("http://127.0.0.1:1", ACCESS_KEY, 5.0)
        there = both.runner._ask

        async def ask(*what: Any) -> Any:
            nonlocal tries
            tries += 1
            return await (away.ask if tries <= 50 else there)(*what)

        both.runner._ask = ask
        batch = await ended(client, (await submit(client, line("a"), line("b"))).id)
        assert batch.request_counts.completed == 2 and tries == 52 and len(generator.submissions) == 2
        await away.close()
    assert [r.getMessage() for r in caplog.records if "batches wait" in r.getMessage()] != []
    assert len(caplog.records) == 1 and "cannot be reached" in caplog.text


async def test_a_line_that_ends_its_connection_again_and_again_fails(
    tmp_path: Path, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the one that ends the coordinator."""
    monkeypatch.setattr(batch_runner, "RETRIES_S", (0.001, 0.002))
    taken = 0

    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        await reader.read(100)
        writer.close()

    broken = await asyncio.start_server(closes, "127.0.0.1", 0)
    async with served(tmp_path, Echo(), text_model) as (client, both):
        api = PublicApi(f"http://127.0.0.1:{broken.sockets[0].getsockname()[1]}", ACCESS_KEY, 5.0)
        both.runner._ask = api.ask
        batch = await ended(client, (await submit(client, line("a"))).id)
        (row,) = await rows_of(client, batch.error_file_id)
        assert row["response"]["status_code"] == 502 and "connection" in row["response"]["body"]["error"]["message"]
        assert taken == batch_runner.MAX_FAILURES
        await api.close()
    broken.close()


async def test_another_server_or_another_token_makes_batches_wait(
    tmp_path: Path, text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    keys = read_api_keys(key_file(tmp_path, f"{KEY} name=a\n"))
    async with served(tmp_path / "data", Echo(), text_model, api_keys=keys) as (_, both):
        other = PublicApi(both.url, "another", 5.0)
        assert (await other.ask(COMPLETIONS, b"{}", "a")).status == 503
        with pytest.raises(public_api.KeyRemoved):
            await PublicApiOnce(both.url).ask("b")
        await other.close()
    strange = await asyncio.start_server(_replies_404, "127.0.0.1", 0)
    api = PublicApi(f"http://127.0.0.1:{strange.sockets[0].getsockname()[1]}", ACCESS_KEY, 5.0)
    assert (await api.ask(COMPLETIONS, b"{}", "")).status == 503
    await api.close()
    strange.close()
    assert "same cluster token" in caplog.text and "another server did" in caplog.text


class PublicApiOnce:
    def __init__(self, url: str) -> None:
        self._url = url

    async def ask(self, key: str) -> Any:
        api = PublicApi(self._url, ACCESS_KEY, 5.0)
        try:
            return await api.ask(COMPLETIONS, b"{}", key)
        finally:
            await api.close()


async def _replies_404(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_draining_stores_the_lines_that_run_and_sends_no_other(tmp_path: Path, text_model: TextModel) -> None:
    """Those that wait for a retry, or for room, are sent by the next run."""
    generator = Echo()
    generator.hold, generator.refusals = asyncio.Event(), 1
    lines = batch_runner.MAX_RUNNING + 20
    async with served(tmp_path, generator, text_model) as (client, both):
        batch = await submit(client, *(line(f"r{i}") for i in range(lines)))
        await generator.until(submitted=batch_runner.MAX_RUNNING + 1)
        draining = asyncio.create_task(both.runner.drain(20.0))
        await asyncio.sleep(0.05)
        assert not draining.done()
        sent = len(generator.submissions)
        generator.hold.set()
        await draining
        found = await client.batches.retrieve(batch.id)
        assert len(generator.submissions) == sent, "no further line"
        assert found.status == "in_progress" and found.request_counts.completed == sent - 1
    second = Echo()
    async with served(tmp_path, second, text_model) as (client, _):
        assert (await ended(client, batch.id)).request_counts.completed == lines
    assert len(second.submissions) == lines - (sent - 1)


async def test_draining_without_batches_or_between_lines_ends_at_once(tmp_path: Path, text_model: TextModel) -> None:
    generator = Echo()
    generator.answers = 1
    async with served(tmp_path, generator, text_model) as (client, both):
        batch = await submit(client, line("a"), line("b"))
        await until_completed(client, batch.id, 1)
        async with asyncio.timeout(5):
            await both.runner.drain(0.05)
        assert (await client.batches.retrieve(batch.id)).request_counts.completed == 1
