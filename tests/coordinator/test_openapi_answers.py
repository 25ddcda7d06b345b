"""Answers match `/openapi.json`: the reply of every route fits its schema, which allows no other fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.types import ASGIApp

from baton.core.request import TokenLogprob
from coordinator.policy.timeline import Timeline
from coordinator.submission import Delta, Usage
from coordinator.text.model import TextModel
from tests.support.batches_kit import with_batches
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
MESSAGE = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def app(text_model: TextModel, generator: FakeGenerator, tmp_path: Path) -> AsyncIterator[ASGIApp]:
    async with with_batches(tmp_path / "data", generator, text_model) as both:
        yield both.app


class Document:
    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def fits(self, path: str, answer: httpx.Response) -> None:
        """Checks an answer; `path` is spelled as in the document."""
        replies = self.document["paths"][path][answer.request.method.lower()]["responses"]
        status = str(answer.status_code)
        content = (replies.get(status) or replies[f"{status[0]}XX"])["content"]
        kind = answer.headers["content-type"].partition(";")[0]
        if kind == "application/json":
            schema = {**content[kind]["schema"], "components": self.document["components"]}
            jsonschema.Draft202012Validator(schema).validate(answer.json())
        else:
            assert kind in content, (path, kind)


_GENERATES = ("generate", "generate_stream")


async def test_events_of_every_stream_are_described_as_objects(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    replies = [m["responses"]["200"]["content"] for path in document["paths"].values() for m in path.values()]
    events = [content["text/event-stream"]["schema"] for content in replies if "text/event-stream" in content]
    assert len(events) >= 6
    assert all(schema["required"] == ["data"] for schema in events)


async def test_every_response_matches_the_openapi_document(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    document = Document((await client.get("/openapi.json")).json())
    seen = set()

    async def check(method: str, path: str, described: str = "", **how: Any) -> httpx.Response:
        answer = await client.request(method, path, **how)
        document.fits(described or path, answer)
        seen.add((method.lower(), described or path))
        return answer

    for path in ("/", "/live", "/health", "/ready", "/metrics", "/workers", "/version", "/get_model_info", "/loads"):
        assert (await check("GET", path)).status_code == 200, path
    for path in ("/tokenizer_info", "/server_info", "/v1/models", "/requests", "/v1/files", "/v1/batches"):
        assert (await check("GET", path)).status_code == 200, path
    assert (await check("GET", "/v1/models/tiny", "/v1/models/{model_id}")).status_code == 200
    version = {"anthropic-version": "2023-06-01"}
    assert (await check("GET", "/v1/models", headers=version)).status_code == 200
    assert (await check("GET", "/v1/models/tiny", "/v1/models/{model_id}", headers=version)).status_code == 200
    assert (await check("POST", f"{MESSAGES}/count_tokens", json=MESSAGE | {"max_tokens": None})).status_code == 200
    assert (await check("GET", "/requests/nobody", "/requests/{request_id}")).status_code == 404
    for path, body in (("/tokenize", {"prompt": "a", "return_token_strs": True}), ("/detokenize", {"tokens": [40]})):
        assert (await check("POST", path, json=body)).status_code == 200
    entry = TokenLogprob(40, -0.5, 1, (40, 41), (-0.5, -1.0))
    scored = [Delta("a", (40,), logprobs=(entry,), prompt_logprobs=(entry,)), reply("b")[0]]
    more = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}
    asked: list[tuple[str, dict[str, Any], list[Any]]] = [
        (COMPLETIONS, {}, reply("a", "b")),
        (COMPLETIONS, {"return_timeline": True}, reply("a")),
        (COMPLETIONS, {"logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True, "echo": True}, scored),
        (CHAT, {}, reply("a", "b")),
        (CHAT, more, scored),
        (COMPLETIONS, {"stream": True}, reply("a", "b")),
        (CHAT, {"temperature": 9}, []),
        (RESPONSES, {}, reply("a", "b")),
        (RESPONSES, {"stream": True}, reply("a", "b")),
        (MESSAGES, {}, reply("a", "b")),
        (MESSAGES, {"stream": True}, reply("a", "b")),
        (MESSAGES, {"max_tokens": -1}, []),
    ]
    for path, fields, script in asked:
        generator.script = script
        good = GOOD.get(path, MESSAGE if path == MESSAGES else {"input": "hi"})
        answer = await check("POST", path, json=good | fields)
        assert answer.status_code == (200 if script else 400), answer.text

    vector = b"\0\0\x80?" * 2
    generator.script = [Delta("", finish_reason="stop", usage=Usage(3, 0), timeline=Timeline(), pooled=vector)]
    for encoding in ("float", "base64"):
        body = {"input": ["a", "b"], "encoding_format": encoding}
        assert (await check("POST", "/v1/embeddings", json=body)).status_code == 200
    assert (await check("POST", "/classify", json={"input": "a"})).status_code == 400
    for path in ("/score", "/v1/score"):
        assert (await check("POST", path, json={"text_1": "a", "text_2": "b"})).status_code == 200
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert (await check("POST", path, json={"query": "a", "documents": ["b"]})).status_code == 200

    assert (await check("POST", "/expect_workers")).status_code == 200
    for operation, given in (("load", {"lora_name": "a", "lora_path": "/a"}), ("unload", {"lora_name": "a"})):
        assert (await check("POST", f"/v1/{operation}_lora_adapter", json=given)).status_code == 400

    generator.script = reply("a", "b")
    kept = (await client.post(RESPONSES, json={"input": "hi"})).json()["id"]
    for method, part in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        described = f"{RESPONSES}/{{response_id}}{part}"
        assert (await check(method, f"{RESPONSES}/{kept}{part}", described)).status_code == 200
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"):
        assert (await check("GET", path)).status_code == 200, path
    assert (await check("POST", "/v2/repository/index")).status_code == 200
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    for of_model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        named = of_model.format(name="tiny", version=1)
        for part in ("", "/ready", "/config", "/stats"):
            assert (await check("GET", named + part, of_model + part)).status_code == 200
        for part, given in (("infer", {"inputs": [text]}), *{key: {"text_input": "a"} for key in _GENERATES}.items()):
            answer = await check("POST", f"{named}/{part}", f"{of_model}/{part}", json=given)
            assert answer.status_code == 200, answer.text
    assert (await check("POST", "/v2/models/tiny/infer", "/v2/models/{name}/infer", json={})).status_code == 400

    line = {"custom_id": "1", "method": "POST", "url": COMPLETIONS, "body": GOOD[COMPLETIONS]}
    form = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
    file = (await check("POST", "/v1/files", **form)).json()["id"]
    body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": "b"}}
    batch = (await check("POST", "/v1/batches", json=body)).json()["id"]
    assert (await check("GET", "/v1/batches")).json()["data"]
    for method, path, described in (
        ("GET", f"/v1/files/{file}", "/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file}/content", "/v1/files/{file_id}/content"),
        ("GET", f"/v1/batches/{batch}", "/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch}/cancel", "/v1/batches/{batch_id}/cancel"),
        ("DELETE", f"/v1/files/{file}", "/v1/files/{file_id}"),
    ):
        await check(method, path, described)
    described_routes = {(method, path) for path, methods in document.document["paths"].items() for method in methods}
    assert seen == described_routes
