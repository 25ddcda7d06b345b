"""`/v2` over the scripted pipeline: infer with JSON and binary tensors, the generate extension, errors, statistics."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton.core.errors import InvalidRequest, Unavailable
from coordinator.http.app import HttpSettings, create_app
from coordinator.inference.render import error_body
from coordinator.inference.tensors import Tensor, packed, unpacked
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator, reply

MODEL = "/v2/models/tiny"


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(reply(" the", " end"))


@pytest.fixture
async def client(generator: FakeGenerator, text_model: TextModel) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as made:
        yield made


def tensor(name: str, datatype: str, *data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": list(data)}


async def test_infer_with_json_tensors(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    inputs = [tensor("text_input", "BYTES", "a", "in"), tensor("max_tokens", "INT32", 5)]
    body = {"id": "7", "inputs": inputs, "parameters": {"temperature": 0}}
    answer = await client.post(f"{MODEL}/infer", json=body)
    assert answer.json() == {
        "model_name": "tiny",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["a the end", "in the end"]}],
    }
    assert [(s.max_tokens, s.sampling.temperature) for s in generator.submissions] == [(5, 0.0)] * 2
    statistics = (await client.get(f"{MODEL}/stats")).json()["model_stats"][0]
    assert statistics["inference_count"] == statistics["inference_stats"]["success"]["count"] == 2


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/octet-stream"}])
async def test_infer_with_binary_tensors_as_triton_s_client_sends_them(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    raw = packed(Tensor("text_input", "BYTES", (1,), ("ü",)))
    head = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    outputs = [
        {"name": "text_output", "parameters": {"binary_data": True}},
        {"name": "finish_reason", "parameters": {"binary_data": False}},
    ]
    header = json.dumps({"inputs": [head], "outputs": outputs}).encode()
    sent = headers | {"inference-header-content-length": str(len(header))}
    answer = await client.post(f"{MODEL}/infer/".rstrip("/"), content=header + raw, headers=sent)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["inference-header-content-length"])
    text, reason = json.loads(answer.content[:length])["outputs"]
    assert reason["data"] == ["stop"] and "data" not in text
    size = text["parameters"]["binary_data_size"]
    assert unpacked("t", "BYTES", (1,), answer.content[length:]).values == ("ü the end",)
    assert len(answer.content) == length + size


async def test_triton_s_timeout_is_a_deadline_and_its_other_scheduling_parameters_are_named(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    infer = {"inputs": [tensor("text_input", "BYTES", "a")]}
    for path, body in (("infer", infer), ("generate", {"text_input": "a"}), ("generate_stream", {"text_input": "a"})):
        for timeout, headers, expected_s in (
            (1_500_000, {}, 1.5),
            (1_500_000, {"x-request-timeout-ms": "500"}, 0.5),
            (0, {}, 600.0),
            (10**15, {}, 600.0),
        ):
            parameters = {"timeout": timeout, "priority": 1, "sequence_id": 7}
            answer = await client.post(f"{MODEL}/{path}", json=body | {"parameters": parameters}, headers=headers)
            assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "priority, sequence_id"
            assert generator.submissions[-1].deadline_s == expected_s
        for wrong in (-1, 1.5, "1", True):
            answer = await client.post(f"{MODEL}/{path}", json=body | {"parameters": {"timeout": wrong}})
            assert answer.status_code == 400 and "'timeout' must be a whole number" in answer.text
    answer = await client.post(f"{MODEL}/generate", json={"text_input": "a", "timeout": 2_000_000})
    assert answer.status_code == 200 and generator.submissions[-1].deadline_s == 2.0


async def test_generate_and_its_stream(client: httpx.AsyncClient) -> None:
    body = {"text_input": "a", "parameters": {"temperature": 0, "exclude_input_in_output": True}}
    answer = await client.post(f"{MODEL}/generate", json=body)
    assert answer.json() == {"model_name": "tiny", "model_version": "1", "text_output": " the end"}
    answer = await client.post(f"{MODEL}/versions/1/generate_stream", json={"text_input": "a", "id": "x"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert [event["text_output"] for event in events] == [" the", " end"] and events[0]["id"] == "x"


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/infer", {"inputs": []}, 400, "text_input"),
        ("/infer", {}, 400, "inputs"),
        ("/infer", {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES"}]}, 400, "data"),
        ("/infer", {"inputs": [tensor("text_input", "BYTES", "a")], "inptus": []}, 400, "inputs"),
        ("/infer", {"inputs": [tensor("text_input", "BYTES", "a"), tensor("stream", "BOOL", True)]}, 400, "stream"),
        ("/infer", {"inputs": [tensor("text_input", "BYTES", "a"), tensor("top_p", "FP32", 7)]}, 400, "top_p"),
        ("/generate", {"text_input": "a", "stream": True}, 400, "generate_stream"),
        ("/generate_stream", {"text_input": "a", "n": 2}, 400, "the pieces of a stream are of one choice, not of 2"),
        ("/generate", {"text_input": "a", "temperatur": 0}, 400, "temperature"),
        ("/generate", {}, 400, "text_input"),
        ("/versions/2/generate", {"text_input": "a"}, 404, "version"),
        ("/nothing", {}, 404, "path"),
    ],
)
async def test_errors_have_the_protocol_s_form_and_name_the_field(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    answer = await client.post(MODEL + path, json=body)
    assert answer.status_code == status and answer.json().keys() == {"error"}
    assert word in answer.json()["error"]


def test_errors_name_the_field_that_their_message_does_not() -> None:
    assert error_body(InvalidRequest("must be even", param="seed"))["error"].endswith(": 'seed': must be even")
    assert error_body(InvalidRequest("seed must be even", param="seed"))["error"].endswith(": seed must be even")
    assert "private" not in error_body(ValueError("private"))["error"]


async def test_wrong_lengths_of_binary_data_are_refused(client: httpx.AsyncClient) -> None:
    def infer(size: Any, length: str, raw: bytes) -> Any:
        head = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": size}}
        header = json.dumps({"inputs": [head]}).encode()
        sent = {"inference-header-content-length": length or str(len(header))}
        return client.post(f"{MODEL}/infer", content=header + raw, headers=sent)

    for size, length, raw in ((5, "", b"\1\0\0\0"), (4, "", b"\0" * 9), (-1, "", b""), ("4", "", b""), (0, "x", b"")):
        assert (await infer(size, length, raw)).status_code == 400
    assert "'inputs[text_input].parameters.binary_data_size': must be" in (await infer("4", "", b"")).json()["error"]
    assert "Content-Length is 9999" in (await infer(0, "9999", b"")).json()["error"]


async def test_ignored_fields_are_named(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    body = {"text_input": "a", "beam_width": 1, "parameters": {"vllm_xargs": {}}}
    answer = await client.post(f"{MODEL}/generate", json=body)
    assert answer.headers["x-ignored-fields"] == "beam_width, vllm_xargs"
    assert ("/v2/models/{name}/generate", "beam_width") in generator.ignored_fields


async def test_the_server_and_its_model_are_described(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    assert (await client.get("/v2/health/live")).status_code == 200
    assert (await client.get("/v2/health/ready")).status_code == 200
    assert (await client.get(f"{MODEL}/ready")).status_code == 200
    assert (await client.get("/v2")).json()["name"] == "baton"
    assert (await client.get(MODEL)).json()["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    assert (await client.get(f"{MODEL}/versions/1/config")).json()["model_transaction_policy"] == {"decoupled": True}
    assert (await client.post("/v2/repository/index")).json()[0]["state"] == "READY"
    generator.not_ready = "no decode worker is ready"
    assert (await client.get("/v2/health/ready")).json() == {"error": "no decode worker is ready"}
    assert (await client.get("/v2/models/other/ready")).status_code == 404


async def test_a_page_of_another_site_cannot_send_undeclared_bodies(client: httpx.AsyncClient) -> None:
    body = json.dumps({"text_input": "a"}).encode()
    assert (await client.post(f"{MODEL}/generate", content=body)).status_code == 200
    answer = await client.post(f"{MODEL}/generate", content=body, headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 415


async def test_failures_are_counted(text_model: TextModel) -> None:
    app = create_app(FakeGenerator([Unavailable("no room")]), text_model, HttpSettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        answer = await client.post(f"{MODEL}/generate", json={"text_input": "a"})
        assert answer.status_code == 503 and answer.json() == {"error": "overloaded: no room"}
        statistics = (await client.get("/v2/models/stats")).json()["model_stats"][0]["inference_stats"]
        assert (statistics["fail"]["count"], statistics["success"]["count"]) == (1, 0)
