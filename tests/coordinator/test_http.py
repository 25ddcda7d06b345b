"""The HTTP endpoints, called on the app without a socket."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import orjson
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from baton.core.errors import DuplicateRequest, Unavailable, WorkerLost
from coordinator.http.app import HttpSettings, create_app
from coordinator.submission import LARGE_ENTRIES, Delta
from coordinator.text import model as listing
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.front_kit import RawClient, running
from tests.support.requests_kit import events

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "Hello"}


async def test_completion(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    response = await client.post("/v1/completions", json=TEXT | {"seed": -1, "temperature": 0, "stop": "x"})
    body = response.json()
    assert response.status_code == 200
    assert body["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert (body["object"], body["model"], body["system_fingerprint"]) == ("text_completion", "tiny", "baton-1.2")
    assert response.headers["server-timing"].startswith("queue;dur=1.000, prefill;dur=0.000")
    submission = generator.submissions[0]
    assert body["id"] == "cmpl-" + submission.request_id == "cmpl-" + response.headers["x-request-id"]
    assert (submission.max_tokens, submission.stop, submission.eos_token_ids) == (16, ("x",), (1,))
    assert submission.sampling.greedy and submission.sampling.seed == 2**64 - 1


async def test_completion_of_token_ids(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        assert (await client.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True})).status_code == 200
        assert generator.submissions[-1].prompt == (5, 6, 7)
        assert generator.submissions[-1].eos_token_ids == ()


async def test_chat(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    submission = generator.submissions[0]
    assert submission.max_tokens == 128 - len(submission.prompt)


async def test_streamed_chunks_join_to_the_whole_text(client: httpx.AsyncClient) -> None:
    text = events(await client.post("/v1/completions", json=TEXT | {"stream": True}))
    assert [e["choices"][0]["text"] for e in text] == ["Hello", " world"]
    assert [e["choices"][0]["finish_reason"] for e in text] == [None, "stop"]
    assert not any("usage" in e for e in text)
    response = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    chat = events(response)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [e["choices"][0]["delta"] for e in chat] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
    ]
    assert len({e["id"] for e in chat}) == 1 and chat[0]["object"] == "chat.completion.chunk"


async def test_stream_usage(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    chunks = events(await client.post("/v1/chat/completions", json=CHAT | options))
    assert [e["usage"] for e in chunks[:-1]] == [None, None, None]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 5
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = events(await client.post("/v1/completions", json={"prompt": [1, 2, 3], **options}))
    assert [e["usage"]["completion_tokens"] for e in chunks] == [1, 2, 2]
    assert [len(e["choices"]) for e in chunks] == [1, 1, 0]


async def test_tokens_without_text_produce_no_empty_events(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("", "a", "", "b", "")
    chunks = events(await client.post("/v1/completions", json=TEXT | {"stream": True}))
    assert [e["choices"][0]["text"] for e in chunks] == ["a", "b", ""]
    chunks = events(await client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert [e["choices"][0]["delta"].get("content") for e in chunks] == ["", "a", "b", ""]


async def test_token_ids_are_returned_with_the_text_on_request(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply("a", "", "b")
    wanted = {"return_token_ids": True}
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        choice = (await client.post(path, json=body | wanted)).json()["choices"][0]
        assert choice["token_ids"] == [0, 1, 2]
        chunks = events(await client.post(path, json=body | wanted | {"stream": True}))
        assert [i for e in chunks for i in e["choices"][0].get("token_ids", [])] == [0, 1, 2]
    assert "token_ids" not in (await client.post("/v1/completions", json=TEXT)).json()["choices"][0]


async def test_unusual_line_breaks_in_text_are_escaped_in_events(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    odd = 'a\u2028b\u2029c\x85d\ne\r"\\'
    generator.script = reply(odd, "中")
    response = await client.post("/v1/completions", json=TEXT | {"stream": True})
    assert not any(c in response.text for c in "\u2028\u2029\x85\r")
    assert "".join(e["choices"][0]["text"] for e in events(response)) == odd + "中"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_stream_events_contain_no_unescaped_unusual_line_breaks(
    generator: FakeGenerator, text_model: TextModel, path: str, fails: bool
) -> None:
    """Wherever they come from: the text, the stop string, the model's name, an error, the request's instructions."""
    odd = "a\u2028b\u2029c\x85d"
    first, last = reply(odd, "", stop_reason=odd)
    generator.script = [first, Unavailable(odd) if fails else last]
    app = create_app(generator, text_model, HttpSettings(f"tiny{odd}", created=1))
    given = {"/v1/responses": {"input": "Hi", "instructions": odd, "metadata": {"k": odd}}, "/v1/completions": TEXT}
    body = given.get(path, CHAT) | {"stream": True, "model": f"tiny{odd}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200 and "a\\u2028b\\u2029c\\u0085d" in response.text
    assert not any(c in response.text for c in "\u2028\u2029\x85")


async def test_stop_reason_names_the_stop_string(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("a", "", stop_reason="END")
    body = (await client.post("/v1/completions", json=TEXT | {"stop": ["END"]})).json()
    assert body["choices"][0]["stop_reason"] == "END"
    chunks = events(await client.post("/v1/completions", json=TEXT | {"stop": "END", "stream": True}))
    assert chunks[-1]["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_first_token_is_an_http_status(
    client: httpx.AsyncClient, generator: FakeGenerator, stream: bool
) -> None:
    generator.script = [Unavailable("no decode worker", code="no_decode_worker", retry_after_s=2.5)]
    response = await client.post("/v1/completions", json=TEXT | {"stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3" and response.headers["x-should-retry"] == "true"
    assert response.json()["error"] == {
        "message": "no decode worker",
        "type": "server_error",
        "param": None,
        "code": "no_decode_worker",
    }
    generator.script = [DuplicateRequest("request id in flight")]
    response = await client.post("/v1/completions", json=TEXT | {"stream": stream}, headers={"x-request-id": "abc"})
    assert (response.status_code, response.headers["x-request-id"]) == (409, "abc")


async def test_error_in_the_middle_of_a_stream_is_an_event(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = [Delta("Hel", (1,)), WorkerLost("decode worker decode-0 died")]
    chunks = events(await client.post("/v1/completions", json=TEXT | {"stream": True}))
    assert chunks[0]["choices"][0]["text"] == "Hel"
    assert chunks[1]["error"]["code"] == "worker_lost" and set(chunks[1]) == {"error"}
    assert len(chunks) == 2
    response = await client.post("/v1/completions", json=TEXT)
    assert response.status_code == 503 and "choices" not in response.json()


@pytest.mark.parametrize("script", [[], [Delta("a", (1,))], [ValueError("/secret")]])
async def test_internal_errors_are_500_without_details(
    client: httpx.AsyncClient, generator: FakeGenerator, script: list[Any]
) -> None:
    generator.script = script
    response = await client.post("/v1/completions", json=TEXT)
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert generator.finished == [response.headers["x-request-id"]]


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    (model,) = body["data"]
    assert body == {"object": "list", "data": [model]}
    expected = {"id": "tiny", "object": "model", "created": 1, "owned_by": "baton", "max_model_len": 128}
    assert model.items() >= expected.items()
    assert (await client.get("/v1/models/tiny")).json() == model
    missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert missing.json()["error"]["message"] == "the model 'org/other' does not exist; 'tiny' is served"


async def test_limits_are_what_the_pools_hold(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.pools_hold = 50
    for path in ("/v1/models/tiny", "/server_info", "/get_model_info"):
        assert (await client.get(path)).json()["max_model_len"] == 50
    assert (await client.post("/tokenize", json={"prompt": "Hello"})).json()["max_model_len"] == 50
    anthropic = await client.get("/v1/models/tiny", headers={"anthropic-version": "2023-06-01"})
    assert anthropic.json()["max_tokens"] == 50
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": [1] * 40}),
    ):
        assert (await client.post(path, json=body)).status_code == 200
        submission = generator.submissions[-1]
        assert len(submission.prompt) + submission.max_tokens == 50, path
    generator.pools_hold = 45
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 45


async def test_tokenize_and_detokenize_round_trip(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "Hello <s>", "return_token_strs": True})).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 128
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "Hello <s>"}
    chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    shown = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_long_token_lists_are_serialized_in_slices_off_the_event_loop(
    client: httpx.AsyncClient, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()
    listed: list[int] = []

    class Named:
        def id_to_token(self, token: int) -> Any:
            threads.add(threading.current_thread())
            return real.id_to_token(token)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    def dumps(content: Any) -> bytes:
        listed.append(len(content))
        return orjson.dumps(content)

    real = text_model.tokenizer
    monkeypatch.setattr(listing, "orjson", SimpleNamespace(dumps=dumps))
    monkeypatch.setattr(listing, "SLICE", 1000)
    monkeypatch.setattr(text_model, "tokenizer", Named())
    monkeypatch.setattr(text_model, "max_token_bytes", None)
    text = '中"' * 3_000
    for names in (True, False):
        body = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": names})).json()
        ids = text_model.encode(text)
        assert len(ids) > LARGE_ENTRIES
        expected = [real.id_to_token(i) for i in ids] if names else None
        assert body == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": expected}
    assert threading.main_thread() not in threads and threads
    assert max(listed) <= 1000


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8])
def test_token_list_is_complete_for_any_number_of_slices(
    count: int, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SLICE", 4)
    ids = [*range(count - 1), 511][:count]  # the model's last id, for which the tokenizer has no name
    names = [text_model.tokenizer.id_to_token(i) for i in ids]
    found = orjson.loads(listing.tokens_json(text_model.tokenizer, ids, 128, names=True))
    assert found == {"count": count, "max_model_len": 128, "tokens": ids, "token_strs": names}


async def test_state_endpoints(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    assert (await client.get("/live")).json() == {"status": "ok"}
    for path in ("/ready", "/health"):
        assert (await client.get(path)).json() == {"ready": True}
    assert (await client.get("/version")).json() == {"version": "1.2"}
    assert (await client.get("/workers")).json()["workers"][0]["id"] == "prefill-0"
    generator.not_ready = "no prefill worker"
    for path in ("/ready", "/health"):
        response = await client.get(path)
        assert response.status_code == 503 and response.json() == {"ready": False, "reason": "no prefill worker"}
        assert response.headers["retry-after"] == "1"
    assert (await client.get("/live")).status_code == 200
    assert (await client.get("/expect_workers")).status_code == 405
    assert (await client.post("/expect_workers")).status_code == (await client.get("/ready")).status_code == 200


async def test_openapi_describes_paths_and_bodies(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/ready"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    validator = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/ChatBody", **document})
    validator.validate(CHAT | {"stop": ["a"], "stream": True, "stream_options": {"include_usage": True}})
    validator.validate(CHAT | {"unknown": 1})
    assert not validator.is_valid({"messages": []})
    assert "prompt" in schemas["CompletionBody"]["required"]
    text = json.dumps(document)
    assert all(ref.split('"')[0] in schemas for ref in text.split('"#/components/schemas/')[1:])


async def test_generator_that_cancels_its_caller_is_an_internal_error(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = [asyncio.CancelledError()]
    assert (await client.post("/v1/completions", json=TEXT)).json()["error"]["code"] == "internal_error"


async def test_gateway_and_load_tool_endpoints(client: httpx.AsyncClient) -> None:
    info = (await client.get("/server_info")).json()
    assert info["version"] == "1.2" and info["model"] == "tiny" and info["workers"] == {"prefill": 1, "decode": 1}
    (load,) = (await client.get("/loads")).json()
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (3, 2, 0.6)
    assert (load["num_reqs"], load["num_choices"]) == (5, 9)
    model = (await client.get("/get_model_info")).json()
    assert model["model_path"] == "tiny" and model["is_generation"] is True
    tokenizer = (await client.get("/tokenizer_info")).json()
    limit = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
    assert tokenizer["model_max_length"] == limit and "eos_token" in tokenizer


async def test_root_page_loads_no_external_resources(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    links = set(re.findall(r"https?://[^\"' ]+", answer.text))
    assert links == {"http://www.w3.org/2000/svg"}, "only the name of a namespace"
    assert "innerHTML" not in answer.text and "eval(" not in answer.text


async def test_head_is_answered_wherever_get_is_and_without_a_body(app: Starlette) -> None:
    paths = [route.path for route in app.routes if isinstance(route, Route) and "GET" in route.methods]
    assert len(paths) > 12
    async with running(app) as server:
        for path in (*(path.replace("{model_id:path}", "tiny") for path in paths), "/openapi.json"):
            raw = await RawClient.connect(server)
            answers = []
            for method in ("GET", "HEAD"):
                await raw.send(f"{method} {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
                head = (await raw.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                answers.append((head[0], next(line for line in head if line.startswith("content-length"))))
                if method == "GET":
                    await raw.reader.readexactly(int(answers[0][1].partition(": ")[2]))
            assert answers[0] == answers[1], path
            await raw.post("/tokenize", {"prompt": "Hello"})  # nothing of a body is in front of the next answer
            assert (await raw.answer())[0] == 200
            await raw.close()


async def test_405_names_every_method_of_its_path(client: httpx.AsyncClient) -> None:
    for method, path, allowed in (
        ("DELETE", "/v1/files", "GET, HEAD, POST"),
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path


async def test_the_maxima_of_limit_are_described(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    (limit,) = paths["/requests"]["get"]["parameters"]
    most = limit["schema"]["maximum"]
    assert limit["schema"]["minimum"] == 1
    assert (await client.get(f"/requests?limit={most}")).status_code == 200
    assert (await client.get(f"/requests?limit={most + 1}")).status_code == 400


async def test_models_have_the_fields_of_vllm(client: httpx.AsyncClient) -> None:
    (entry,) = (await client.get("/v1/models")).json()["data"]
    assert (entry["root"], entry["parent"]) == ("tiny", None)
    (permission,) = entry["permission"]
    assert permission["id"].startswith("modelperm-") and permission["object"] == "model_permission"
    assert permission["allow_sampling"] is permission["allow_logprobs"] is True and permission["is_blocking"] is False


async def test_one_byte_order_mark_in_front_of_a_body_is_skipped(client: httpx.AsyncClient) -> None:
    mark, kind = b"\xef\xbb\xbf", {"content-type": "application/json"}
    raw = json.dumps(TEXT).encode()
    assert (await client.post("/v1/completions", content=mark + raw, headers=kind)).status_code == 200
    for wrong in (mark + mark + raw, raw + mark, mark):
        assert (await client.post("/v1/completions", content=wrong, headers=kind)).status_code == 400


async def test_files_and_batches_are_off_without_a_batches_process(client: httpx.AsyncClient) -> None:
    for path in ("/v1/files", "/v1/batches"):
        for answer in (await client.get(path), await client.post(path)):
            assert answer.status_code == 400 and "--data-dir" in answer.json()["error"]["message"]


async def test_a_deadline_of_the_client(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        for given, expected_s in (("1500", 1.5), ("999999999", 600.0)):
            assert (await client.post(path, json=body, headers={"x-request-timeout-ms": given})).status_code == 200
            assert generator.submissions[-1].deadline_s == expected_s
        count = len(generator.submissions)
        for given in ("0", "-1", "1.5", "", "1" * 10, "٣"):
            headers = {"x-request-timeout-ms": given.encode()}
            refused = await client.post(path, json=body, headers=headers)  # type: ignore[arg-type]
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-request-timeout-ms", given
            assert "from 1 to 999999999" in refused.json()["error"]["message"]
        assert len(generator.submissions) == count
