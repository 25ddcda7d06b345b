"""inference.GRPCInferenceService over the scripted pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.core.errors import Unavailable
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from coordinator.api_keys import read_api_keys
from coordinator.grpc import inference
from coordinator.inference.tensors import Tensor, packed, unpacked
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.grpc_kit import served


def asked(*inputs: Tensor, raw: bool = True, **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny", **fields)
    for tensor in inputs:
        made = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            request.raw_input_contents.append(packed(tensor))
        elif tensor.datatype == "BYTES":
            made.contents.bytes_contents.extend(value.encode() for value in tensor.values)
        elif tensor.datatype == "BOOL":
            made.contents.bool_contents.extend(tensor.values)
        else:
            made.contents.int_contents.extend(tensor.values)
    return request


def text(*values: str) -> Tensor:
    return Tensor("text_input", "BYTES", (len(values),), values)


def outputs(response: pb.ModelInferResponse) -> dict[str, tuple[Any, ...]]:
    return {
        out.name: unpacked(out.name, out.datatype, tuple(out.shape), raw).values
        for out, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


@pytest.mark.parametrize("raw", [True, False])
async def test_infer_returns_the_whole_text(text_model: TextModel, raw: bool) -> None:
    generator = FakeGenerator(reply(" the", " end"))
    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        tokens = Tensor("max_tokens", "INT32", (1,), (9,))
        request = asked(text("a hall"), tokens, raw=raw, id="42")
        request.parameters["temperature"].double_param = 0.0
        response = await stub.ModelInfer(request, timeout=30)
        assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "42")
        assert outputs(response) == {"text_output": ("a hall the end",)}
        (submission,) = generator.submissions
        assert (submission.max_tokens, submission.sampling.temperature) == (9, 0.0)
        statistics = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="tiny"), timeout=30)).model_stats[0]
        assert (statistics.inference_count, statistics.inference_stats.success.count) == (1, 1)
        assert statistics.inference_stats.success.ns > 0 and statistics.last_inference > 0


async def test_a_timeout_is_a_deadline_beside_that_of_the_call(text_model: TextModel) -> None:
    generator = FakeGenerator(reply(" x"))
    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        for timeout_us, low, high in ((1_500_000, 1.5, 1.5), (10**15, 2.0, 60.0)):
            request = asked(text("a"))
            request.parameters["timeout"].int64_param = timeout_us
            await stub.ModelInfer(request, timeout=30)
            assert low <= generator.submissions[-1].deadline_s <= high


async def test_several_texts_are_several_elements_in_their_order(text_model: TextModel) -> None:
    async with served(FakeGenerator(reply(" x")), text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        response = await stub.ModelInfer(asked(text("a", "the", "in")), timeout=30)
        assert outputs(response) == {"text_output": ("a x", "the x", "in x")}


async def test_a_stream_yields_pieces_and_errors_without_ending(text_model: TextModel) -> None:
    generator = FakeGenerator(reply(" one", " two", " three"))

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        stream = Tensor("stream", "BOOL", (1,), (True,))
        yield asked(text("a"), stream, id="first")
        await generator.until(finished=1)
        yield asked(text("a"), Tensor("top_p", "FP32", (1,), (7.0,)), id="wrong")
        yield asked(text("a", "b"), stream, id="two")
        yield asked(text("a"), Tensor("stream", "BOOL", (1,), (False,)), id="whole")

    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        answers = [answer async for answer in stub.ModelStreamInfer(requests(), timeout=30)]
        by_id: dict[str, list[Any]] = {}
        for answer in answers:
            by_id.setdefault(answer.infer_response.id, []).append(answer)
        first = [outputs(answer.infer_response)["text_output"][0] for answer in by_id["first"]]
        assert first == [" one", " two", " three"]
        finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in by_id["first"]]
        assert finals == [False, False, True]
        (wrong,) = by_id["wrong"]
        assert "top_p" in wrong.error_message and wrong.infer_response.parameters["triton_final_response"].bool_param
        assert "the pieces of a stream are of one text, not of 2" in by_id["two"][0].error_message
        (whole,) = by_id["whole"]
        assert outputs(whole.infer_response) == {"text_output": ("a one two three",)}


async def test_a_client_that_leaves_a_stream_ends_its_requests(text_model: TextModel) -> None:
    generator = FakeGenerator([*reply(" x")[:-1], asyncio.Event()], endless=True)
    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        call = stub.ModelStreamInfer()
        await call.write(asked(text("a"), Tensor("stream", "BOOL", (1,), (True,))))
        await generator.until(submitted=1)
        call.cancel()
        await generator.until(finished=1)


async def test_only_running_requests_keep_a_silent_stream_open(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "IDLE_S", 0.1)
    proceed = asyncio.Event()
    generator = FakeGenerator([proceed, *reply(" y")])
    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        call = stub.ModelStreamInfer(timeout=30)
        await call.write(asked(text("a"), Tensor("stream", "BOOL", (1,), (True,))))
        await generator.until(submitted=1)
        await asyncio.sleep(0.5)
        proceed.set()
        answers = []
        with pytest.raises(grpc.aio.AioRpcError, match="no message of the stream arrived within") as refused:
            async for answer in call:
                answers.append(answer)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert answers[-1].infer_response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (asked(), grpc.StatusCode.INVALID_ARGUMENT, "'text_input' is required"),
        (pb.ModelInferRequest(model_name="other"), grpc.StatusCode.INVALID_ARGUMENT, "'text_input' is required"),
        (
            asked(text("a"), Tensor("stream", "BOOL", (1,), (True,))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "ModelStreamInfer",
        ),
        (
            asked(text("a"), Tensor("temperature", "INT32", (1,), (-3,))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature",
        ),
        (asked(text("a"), Tensor("temperatur", "INT32", (1,), (1,))), grpc.StatusCode.INVALID_ARGUMENT, "did you mean"),
        (asked(text("a"), raw_input_contents=[b"", b""]), grpc.StatusCode.INVALID_ARGUMENT, "3 entries for 1 inputs"),
    ],
)
async def test_a_wrong_request_is_refused_by_its_field(
    text_model: TextModel, request_: pb.ModelInferRequest, code: grpc.StatusCode, message: str
) -> None:
    generator = FakeGenerator()
    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(request_, timeout=30)
        assert refused.value.code() is code and message in (refused.value.details() or "")
        assert not generator.submissions


async def test_errors_of_the_cluster_have_their_status_and_count_as_failed(text_model: TextModel) -> None:
    async with served(FakeGenerator([Unavailable("no room")]), text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.ModelInfer(asked(text("a")), timeout=30)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        statistics = (await stub.ModelStatistics(pb.ModelStatisticsRequest(), timeout=30)).model_stats[0]
        assert (statistics.inference_stats.fail.count, statistics.inference_stats.success.count) == (1, 0)


async def test_the_server_and_its_model_are_described(text_model: TextModel) -> None:
    async with served(FakeGenerator(not_ready="no decode worker"), text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        assert (await stub.ServerLive(pb.ServerLiveRequest(), timeout=30)).live
        assert not (await stub.ServerReady(pb.ServerReadyRequest(), timeout=30)).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="tiny"), timeout=30)).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=30)).name == "baton"
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny", version="1"), timeout=30)
        assert metadata.inputs[0].name == "text_input" and metadata.outputs[0].datatype == "BYTES"
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="tiny"), timeout=30)).config
        assert config.model_transaction_policy.decoupled and config.input[0].data_type == pb.TYPE_STRING
        (entry,) = (await stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=30)).models
        assert (entry.name, entry.state, entry.reason) == ("tiny", "UNAVAILABLE", "no decode worker")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="other"), timeout=30)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_only_probes_need_no_key(text_model: TextModel, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("a-key-of-sufficient-length\n")
    file.chmod(0o600)
    async with served(FakeGenerator(), text_model, read_api_keys(str(file))) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        assert (await stub.ServerLive(pb.ServerLiveRequest(), timeout=30)).live
        for call in (
            stub.ModelInfer(asked(text("a")), timeout=30),
            stub.ModelConfig(pb.ModelConfigRequest(), timeout=30),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_ignored_fields_are_in_the_trailing_metadata(text_model: TextModel) -> None:
    generator = FakeGenerator()
    async with served(generator, text_model) as client:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        request = asked(text("a"))
        request.parameters["beam_width"].int64_param = 1
        call = stub.ModelInfer(request, timeout=30)
        await call
        assert dict(await call.trailing_metadata())["x-ignored-fields"] == "beam_width"
        other = asked(text("a"))
        other.parameters["early_stopping"].bool_param = True
        stream = stub.ModelStreamInfer(iter((request, other, asked(text("a")))), timeout=30)
        assert len([answer async for answer in stream]) >= 3
        named = [value for name, value in await stream.trailing_metadata() if name == "x-ignored-fields"]
        assert named == ["beam_width, early_stopping"]
