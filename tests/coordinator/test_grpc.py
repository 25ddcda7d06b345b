"""The public gRPC API over a scripted generator."""

from __future__ import annotations

import asyncio
import logging
import re
from hashlib import sha256
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.core import errors
from baton.core.request import SamplingParams, TokenBias, TokenLogprob
from baton.v1 import serving_pb2 as pb
from baton.v1 import types_pb2
from coordinator.api_keys import ApiKeys
from coordinator.grpc import calls
from coordinator.grpc.service import NEUTRAL, SERVICE, PublicServer
from coordinator.metrics import Metrics
from coordinator.policy import quotas
from coordinator.submission import Delta
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.grpc_kit import Client, served

TENANTS = {"key-a": "one", "key-b": "one", "key-c": "other"}


async def test_a_call_sends_started_then_deltas_then_finished(grpc_client: Client, generator: FakeGenerator) -> None:
    generator.script = reply("Hel", "lo", " you", finish="length")
    started, *deltas, finished = await grpc_client.all(request_id="mine", model="tiny", max_tokens=3)
    assert started.WhichOneof("message") == "started"
    assert (started.started.request_id, started.started.model, started.started.prompt_tokens) == ("mine", "tiny", 3)
    assert [(d.delta.first_index, list(d.delta.token_ids), d.delta.text) for d in deltas] == [
        (0, [0], "Hel"),
        (1, [1], "lo"),
        (2, [2], " you"),
    ]
    f = finished.finished
    assert (f.finish_reason, f.prompt_tokens, f.completion_tokens, f.cached_tokens) == ("length", 3, 3, 1)
    assert (f.stages.queue_s, f.stages.decode_s) == (0.001, 0.25)


async def test_finished_names_the_stop_string(grpc_client: Client, generator: FakeGenerator) -> None:
    generator.script = reply("x", stop_reason="END")
    *_, finished = await grpc_client.all(stop=["END"])
    assert (finished.finished.finish_reason, finished.finished.stop_reason) == ("stop", "END")
    assert generator.submissions[0].stop == ("END",)


async def test_text_and_chat_prompts_are_accepted_and_empty_text_is_refused(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    await grpc_client.all(text="Hello")
    await grpc_client.all(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")]))
    assert all(s.prompt for s in generator.submissions)
    code, _, details, _ = await grpc_client.refused(text="")
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details["BadRequest"].field_violations[0].field == "prompt"


async def test_an_explicit_zero_is_not_treated_as_unset(grpc_client: Client, generator: FakeGenerator) -> None:
    await grpc_client.all(sampling=types_pb2.SamplingParams(temperature=0.0, seed=0))
    assert generator.submissions[0].sampling.temperature == 0.0
    assert generator.submissions[0].sampling.seed == 0
    code, _, details, _ = await grpc_client.refused(max_tokens=0)
    assert (code, details["BadRequest"].field_violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens")


async def test_every_sampling_field_reaches_the_submission(grpc_client: Client, generator: FakeGenerator) -> None:
    asked = types_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        seed=-1,
        logit_bias={5: 1.5, 2: -1.0},
        min_tokens=2,
        stop_token_ids=[4],
        bad_words=[types_pb2.TokenIds(ids=[8, 9])],
        allowed_token_ids=[6, 5],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=3,
    )
    await grpc_client.all(sampling=asked, max_tokens=5)
    (submission,) = generator.submissions
    assert (submission.prompt, submission.max_tokens, submission.eos_token_ids) == ((1, 2, 3), 5, ())
    biases = (TokenBias(2, -1.0), TokenBias(5, 1.5))
    assert submission.sampling == SamplingParams(
        0.5, 0.75, 3, (1 << 64) - 1, 0.25, 1.5, -0.5, 0.25, biases, 2, (4,), ((8, 9),), (5, 6), 0, 3
    )


async def test_log_probabilities_and_the_stop_token_are_returned(grpc_client: Client, generator: FakeGenerator) -> None:
    score = TokenLogprob(0, -0.5, 1, (0, 3), (-0.5, -1.5))
    first = Delta("a", (0,), logprobs=(score,), prompt_logprobs=(TokenLogprob(9, -2.0, 4),))
    last = reply("b", stop_reason=17)[0]
    generator.script = [first, last]
    asked = types_pb2.SamplingParams(logprobs=2, prompt_logprobs=0)
    started, delta, *_, finished = await grpc_client.all(sampling=asked)
    assert [(p.token_id, p.logprob, p.rank) for p in started.started.prompt_logprobs] == [(9, -2.0, 4)]
    (found,) = delta.delta.logprobs
    assert (found.token_id, found.logprob) == (0, -0.5)
    assert (list(found.top_ids), list(found.top_logprobs)) == ([0, 3], [-0.5, -1.5])
    assert finished.finished.stop_reason == "17"


async def test_unsupported_fields_are_accepted_with_values_that_have_no_effect(grpc_client: Client) -> None:
    messages = await grpc_client.all(**{name: values[0] for name, values in NEUTRAL.items()})
    assert messages[-1].WhichOneof("message") == "finished"


async def test_cancelling_a_call_closes_the_generator(grpc_client: Client, generator: FakeGenerator) -> None:
    generator.script = [*reply("a", "b")[:1], asyncio.Event()]
    call = grpc_client.generate()
    assert (await call.read()).WhichOneof("message") == "started"
    assert (await call.read()).WhichOneof("message") == "delta"
    call.cancel()
    await generator.until(finished=1)


async def test_cancelling_before_the_first_token_closes_the_generator(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    generator.script = [asyncio.Event()]
    call = grpc_client.generate()
    reading = asyncio.ensure_future(call.read())
    await generator.until(submitted=1)
    call.cancel()
    await generator.until(finished=1)
    await asyncio.wait({reading})


async def test_the_deadline_of_the_call_is_the_deadline_of_the_request(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    generator.script = [asyncio.Event()]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in grpc_client.generate(timeout=0.2):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < generator.submissions[0].deadline_s < 0.21  # gRPC rounds it up
    await generator.until(finished=1)


async def test_a_call_without_a_deadline_gets_the_default_deadline(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    await grpc_client.all()
    assert generator.submissions[0].deadline_s == 600.0


async def test_model_info_returns_the_name_vocabulary_size_and_eos_tokens(
    grpc_client: Client, generator: FakeGenerator, text_model: TextModel
) -> None:
    info = await grpc_client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.max_model_len) == ("tiny", text_model.vocab_size, 128)
    assert tuple(info.eos_token_ids) == text_model.eos_token_ids


async def test_model_info_and_omitted_max_tokens_follow_what_the_pools_hold(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    generator.pools_hold = 50
    assert (await grpc_client.stub.GetModelInfo(pb.GetModelInfoRequest())).max_model_len == 50
    await grpc_client.all(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")]))
    (submission,) = generator.submissions
    assert len(submission.prompt) + submission.max_tokens == 50


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_reports_whether_the_pools_are_ready(
    grpc_client: Client, generator: FakeGenerator, service: str
) -> None:
    stub = health_pb2_grpc.HealthStub(grpc_client.channel)
    asked = health_pb2.HealthCheckRequest(service=service)
    assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
    generator.not_ready = "no decode worker is ready"
    assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_refuses_watch_calls_and_unknown_services(grpc_client: Client, generator: FakeGenerator) -> None:
    """An unread Watch, or names of a megabyte, prevented grpc's own servicer from reporting the true state."""
    stub = health_pb2_grpc.HealthStub(grpc_client.channel)
    unknown = health_pb2.HealthCheckRequest(service="a" * 50_000)
    for call, code in (
        (stub.Watch(health_pb2.HealthCheckRequest()), grpc.StatusCode.UNIMPLEMENTED),
        (stub.Watch(unknown), grpc.StatusCode.UNIMPLEMENTED),
        (stub.Check(unknown), grpc.StatusCode.NOT_FOUND),
    ):
        async with asyncio.timeout(30):
            assert await call.code() is code
            assert len(await call.details()) < 100


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_and_describes_the_service(grpc_client: Client, version: str) -> None:
    info = grpc_client.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = info()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {s.name for s in (await call.read()).list_services_response.service}
    assert names >= {SERVICE, "grpc.health.v1.Health"}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
    assert (await call.read()).file_descriptor_response.file_descriptor_proto
    call.cancel()


async def test_a_port_in_use_is_a_startup_error(generator: FakeGenerator, text_model: TextModel) -> None:
    first = PublicServer(generator, Translator(text_model), "tiny", 1 << 16)
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(errors.StartupError, match=f"gRPC port {port} on 127.0.0.1 is in use"):
        await PublicServer(generator, Translator(text_model), "tiny", 1 << 16).start("127.0.0.1", port)
    await first.stop(0)


async def test_messages_carry_the_index_of_their_choice(grpc_client: Client, generator: FakeGenerator) -> None:
    mixed = zip(reply("a", "b"), reply("x", "y", finish="length"), strict=True)
    generator.script = [d._replace(choice=c) for pair in mixed for c, d in enumerate(pair)]  # type: ignore[union-attr]
    messages = await grpc_client.all(n=2)
    assert generator.submissions[0].n == 2
    deltas = [m.delta for m in messages if m.WhichOneof("message") == "delta"]
    assert [(d.choice, d.first_index, d.text) for d in deltas] == [(0, 0, "a"), (1, 0, "x"), (0, 1, "b"), (1, 1, "y")]
    finished = [m.finished for m in messages if m.WhichOneof("message") == "finished"]
    assert [(f.choice, f.finish_reason) for f in finished] == [(0, "stop"), (1, "length")]


async def test_the_cache_salt_reaches_the_submission_and_its_length_is_limited(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    await grpc_client.all(cache_salt="team-7")
    await grpc_client.all()
    assert [s.cache_salt for s in generator.submissions] == ["team-7", ""]
    code, _, details, _ = await grpc_client.refused(cache_salt="x" * 257)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in details["BadRequest"].field_violations] == ["cache_salt"]


async def test_a_call_whose_client_does_not_read_is_closed(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SEND_TIMEOUT_S", 0.5)
    generator = FakeGenerator([Delta("x" * 100_000, (1,))] * 10, endless=True)
    async with served(generator, text_model) as client:
        call = client.generate()
        await call.read()
        await generator.until(finished=1, timeout_s=20)  # the server has closed it
        call.cancel()


async def test_a_connection_that_sends_nothing_is_closed(text_model: TextModel) -> None:
    async with served(FakeGenerator(), text_model) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        async with asyncio.timeout(30):
            while await reader.read(4096):
                pass
        writer.close()


async def test_request_ids_are_unique_within_a_tenant_only(generator: FakeGenerator, text_model: TextModel) -> None:
    """A client can neither block another tenant's ids nor learn which are in use."""
    clients = {sha256(key.encode()).digest(): quotas.Client(key, tenant) for key, tenant in TENANTS.items()}
    generator.script = [asyncio.Event()]
    async with served(generator, text_model, ApiKeys(clients)) as client:

        def call(key: str) -> Any:
            metadata = (("authorization", f"Bearer {key}"),)
            return client.stub.Generate(pb.GenerateRequest(request_id="job-1", text="a"), metadata=metadata)

        first = call("key-a")
        await generator.until(submitted=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("key-b").read()  # of the same tenant
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS and len(generator.submissions) == 1
        other = call("key-c")
        await generator.until(submitted=2)
        generator.script = reply("a")
        for running in (first, other):
            running.cancel()
        await generator.until(finished=2)
        async with asyncio.timeout(10):
            while True:  # the id is free again once the cancelled call has ended
                try:
                    started = await call("key-a").read()
                    break
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert started.started.request_id == "job-1"
    inner = [submission.request_id for submission in generator.submissions]
    assert len(set(inner)) == 3 and all(re.fullmatch("job-1-[0-9a-f]{8}", name) for name in inner)


async def test_an_id_with_spaces_is_one_word_in_the_log(
    grpc_client: Client, generator: FakeGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    forged = "a finished: stop; 9 prompt tokens"
    started, *_ = await grpc_client.all(request_id=forged)
    assert started.started.request_id == forged
    (submission,) = generator.submissions
    assert " " not in submission.request_id
    caplog.set_level(logging.INFO, "baton.requests")
    Metrics().request(submission).end(ValueError())
    Metrics(slow_s=1e-9).request(submission).end(ValueError())
    assert caplog.records[-1].getMessage().startswith(f"slow: {forged.replace(' ', '%20')}-")
