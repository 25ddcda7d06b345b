"""The public gRPC API: Serving.Generate, health and reflection, over the same translator and pipeline as HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from baton.core.errors import DuplicateRequest, InvalidRequest, InvariantError, Unauthenticated
from baton.core.events import StageStamps
from baton.core.sampling_limits import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_GRAMMAR_CHARS,
    MAX_STOP_TOKENS,
    check_bad_word_length,
    check_count,
)
from baton.runtime import codec, health, status
from baton.runtime.event_loop import off_loop
from baton.runtime.first_message import FirstMessage, parsed, unknown_fields
from baton.runtime.ignored_fields import as_header
from baton.runtime.ports import SHARED_PORTS, open_port
from baton.runtime.streams import SERVER_OPTIONS
from baton.v1 import serving_pb2, types_pb2
from coordinator.api_keys import ApiKeys
from coordinator.connections import GRPC, connection_limit
from coordinator.grpc.calls import abort, internal_id, refuse, sent_value, sent_with, write
from coordinator.grpc.inference import SERVICE as INFERENCE
from coordinator.grpc.inference import Inference
from coordinator.grpc.pooling import classified, embed, score
from coordinator.inference.served import ServedModel
from coordinator.pipeline import Pipeline
from coordinator.policy.quotas import Client
from coordinator.structured_output import Constraint
from coordinator.submission import Delta, Submission, is_large
from coordinator.text.chat import ChatMessage
from coordinator.translate import MAX_MESSAGES, MAX_STOPS, Options, Translator

log = logging.getLogger("baton.grpc")
SERVICE = serving_pb2.DESCRIPTOR.services_by_name["Serving"].full_name
SERVED = frozenset(
    {
        *("request_id", "model", "text", "token_ids", "messages", "max_tokens", "sampling", "stop", "n"),
        *("cache_salt", "priority"),
    }
)
_SCALARS = tuple(
    f.name
    for f in types_pb2.SamplingParams.DESCRIPTOR.fields
    if f.has_presence and f.name in {option.name for option in fields(Options)}
)
SERVED_SAMPLING = frozenset(_SCALARS) | {*("logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids", "grammar")}
# Fields that this version does not serve, with the values that have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {"include_stop_str_in_output": (False,), "echo": (False,)}
MAX_CONCURRENT_STREAMS = 256
"""Per connection. Many users may share a channel; calls over the limit wait at the client."""
MAX_MESSAGE_BYTES = 1 << 20
TOKEN_BYTES = 8  # per prompt token: an id takes 4 at most, its text about 4
IGNORED = "x-ignored-fields"
ABORT_S = 5.0
IDLE_CONNECTION_S = 120  # clients reconnect automatically
CONNECTION_AGE_S = 3600  # then as long again for running calls: ends those whose client reads nothing


class Serving(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The service. A call without a valid key ends before its message is read. Messages are parsed here: for invalid
    bytes grpc would reply UNKNOWN and log a traceback. Its own state: tenant and id of the calls that generate."""

    def __init__(
        self, pipeline: Pipeline, translator: Translator, model: str, keys: ApiKeys, strict_fields: bool = False
    ) -> None:
        self._pipeline = pipeline
        self._strict = strict_fields
        self._running: set[tuple[str, str]] = set()
        self._keys = keys
        self._translator = translator
        self._model = model

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Returns the handler of one call; None for other services."""
        of, _, method = handler_call_details.method[1:].partition("/")
        if of != SERVICE:
            return None
        try:
            client = self._keys.client(sent_value(handler_call_details.invocation_metadata, "authorization"))
        except Unauthenticated as refused:
            return grpc.stream_unary_rpc_method_handler(partial(refuse, refused))
        serialize = {"response_serializer": operator.methodcaller("SerializeToString")}
        match method:
            case "Generate":
                return grpc.unary_stream_rpc_method_handler(partial(self._generate, client), **serialize)
            case "GetModelInfo":
                return grpc.unary_unary_rpc_method_handler(self._model_info, **serialize)
            case "Embed":
                answer = partial(self._pooled, serving_pb2.EmbedRequest, embed, client)
                return grpc.unary_unary_rpc_method_handler(answer, **serialize)
            case "Classify":
                answer = partial(self._pooled, serving_pb2.ClassifyRequest, classified, client)
                return grpc.unary_unary_rpc_method_handler(answer, **serialize)
            case "Score":
                answer = partial(self._pooled, serving_pb2.ScoreRequest, score, client)
                return grpc.unary_unary_rpc_method_handler(answer, **serialize)
        return None

    async def _generate(self, client: Client, content: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            self._pipeline.check_room(client, context.time_remaining())
            await self._answer(client, content, context)
        except Exception as e:
            del content
            await _fail(e, context)

    async def _pooled(
        self,
        kind: type[Any],
        answer: Callable[..., Awaitable[Any]],
        client: Client,
        content: bytes,
        context: grpc.aio.ServicerContext,
    ) -> Any:
        """Answers a call of Embed, Classify or Score with `answer`; `kind` is its message."""
        try:
            self._pipeline.check_room(client, context.time_remaining())
            request = parsed(kind, content)
            self._name_unknown(request, kind.DESCRIPTOR.name.removesuffix("Request"), context)
            adapter = self._adapter(request.model)
            _, name = _request_id(request.request_id, client)
            response = await answer(self._pipeline, self._translator, client, adapter, name, request, context)
            response.request_id, response.model = name, request.model or self._model
            return response
        except Exception as e:
            del content
            await _fail(e, context)

    async def _answer(self, client: Client, content: bytes, context: grpc.aio.ServicerContext) -> None:
        request = parsed(serving_pb2.GenerateRequest, content)
        self._name_unknown(request, "Generate", context)
        name = _request_id(request.request_id, client)
        if name in self._running:
            raise DuplicateRequest(f"request {name[1]!r} is already in flight", param="request_id")
        self._running.add(name)
        try:
            await self._generate_as(name[1], request, client, context)
        finally:
            self._running.discard(name)

    async def _generate_as(
        self, name: str, request: serving_pb2.GenerateRequest, client: Client, context: grpc.aio.ServicerContext
    ) -> None:
        """Generates under the client's own id."""
        inner = internal_id(name) if request.request_id else name
        adapter, sent = self._adapter(request.model), sent_with(context)
        submission = await self._submission(inner, request, context.time_remaining())
        submission = submission.of(client, *sent, adapter=adapter)
        model = request.model or self._model
        async with contextlib.aclosing(self._pipeline.generate(submission)) as deltas:
            index: Counter[int] = Counter()
            async for delta in deltas:
                large = is_large([delta])
                if not index.total():
                    await write(context, await off_loop(large, self._started, name, model, submission, delta))
                await write(context, await off_loop(large, _delta, delta, index[delta.choice]))
                index[delta.choice] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    await write(context, _finished(delta))

    async def _model_info(self, content: bytes, context: grpc.aio.ServicerContext) -> serving_pb2.GetModelInfoResponse:
        try:
            self._name_unknown(parsed(serving_pb2.GetModelInfoRequest, content), "GetModelInfo", context)
        except InvalidRequest as e:
            del content
            await abort(e, context)
        text = self._translator.text
        return serving_pb2.GetModelInfoResponse(
            model=self._model,
            max_model_len=self._translator.max_model_len(),
            vocab_size=text.vocab_size,
            eos_token_ids=text.eos_token_ids,
        )

    def _name_unknown(self, request: Message, method: str, context: grpc.aio.ServicerContext) -> None:
        """Names unknown fields in the trailing metadata. Raises InvalidRequest if they are to be refused."""
        if names := unknown_fields(request):
            shown = as_header(names)
            if self._strict:
                raise InvalidRequest(f"unknown field numbers: {shown}", code="unknown_parameter", param=shown)
            self._pipeline.ignored(f"/{SERVICE}/{method}", names)
            context.set_trailing_metadata(((IGNORED, shown),))

    async def _submission(
        self, request_id: str, request: serving_pb2.GenerateRequest, remaining_s: float | None
    ) -> Submission:
        _refuse_unserved(request)
        options = _options(request, self._translator.text.vocab_size)
        translate = self._translator
        match request.WhichOneof("prompt"):
            case "text":
                return await translate.from_text(request_id, request.text, options, deadline_s=remaining_s)
            case "token_ids":
                ids = request.token_ids.ids  # not a tuple: they are counted first
                return await translate.from_token_ids(request_id, ids, options, deadline_s=remaining_s)
            case "messages":
                check_count("messages", len(request.messages.messages), MAX_MESSAGES)
                messages = tuple(ChatMessage(m.role, m.content) for m in request.messages.messages)
                return await translate.from_messages(request_id, messages, options, deadline_s=remaining_s)
            case _:
                raise InvalidRequest("one of text, token_ids and messages is required", param="prompt")

    def _adapter(self, name: str) -> str:
        """Returns the digest of the adapter that a request names as the model; empty for none. Raises NotFound."""
        return self._pipeline.adapters.chosen(name or self._model, self._model)

    def _started(self, name: str, model: str, submission: Submission, first: Delta) -> serving_pb2.GenerateResponse:
        started = serving_pb2.Started(
            request_id=name,
            model=model,
            prompt_tokens=len(submission.prompt),
            prompt_logprobs=[codec.to_message(entry) for entry in first.prompt_logprobs or ()],
        )
        return serving_pb2.GenerateResponse(started=started)


async def _fail(error: Exception, context: grpc.aio.ServicerContext) -> None:
    """Ends a call with an error. Errors other than BatonError have a row in the table too: they are bugs of ours."""
    if status.row(error).hide:
        log.error("internal error: %s", type(error).__name__, exc_info=error)
    with contextlib.suppress(TimeoutError):  # it waits behind messages that the client does not read
        async with asyncio.timeout(ABORT_S):
            await abort(error, context)


def _request_id(given: str, client: Client) -> tuple[str, str]:
    """Returns the tenant and the request's id, which is unique among the running requests of the tenant.

    Raises:
        InvalidRequest: it is too long, or not printable ASCII.
    """
    request_id = given or secrets.token_hex(16)
    if len(request_id) > 128 or not request_id.isascii() or not request_id.isprintable():
        raise InvalidRequest("request_id must be at most 128 printable ASCII characters", param="request_id")
    return client.tenant, request_id


def _refuse_unserved(request: serving_pb2.GenerateRequest) -> None:
    """Refuses, by name, a field that would change the output and is not served; it is never ignored."""
    for message, served in ((request.sampling, SERVED_SAMPLING), (request, SERVED)):
        for field, value in message.ListFields():
            if field.name in served or value in NEUTRAL.get(field.name, ()):
                continue
            raise InvalidRequest(f"{field.name} is not supported by this version", param=field.name)


def _options(request: serving_pb2.GenerateRequest, vocab_size: int) -> Options:
    s = request.sampling
    check_count("stop", len(request.stop), MAX_STOPS)  # all before any entry is read: there may be a million
    check_count("logit_bias", len(s.logit_bias), MAX_BIASES)
    check_count("stop_token_ids", len(s.stop_token_ids), MAX_STOP_TOKENS)
    check_count("bad_words", len(s.bad_words), MAX_BAD_WORDS)
    for word in s.bad_words:
        check_bad_word_length(len(word.ids))
    check_count("allowed_token_ids", len(s.allowed_token_ids), vocab_size)
    check_count("grammar", len(s.grammar), MAX_GRAMMAR_CHARS, "characters")
    given = {name: getattr(s, name) for name in _SCALARS if s.HasField(name)}
    given |= {name: getattr(request, name) for name in ("max_tokens", "n", "priority") if request.HasField(name)}
    return Options(
        stop=tuple(request.stop),
        cache_salt=request.cache_salt or None,
        logit_bias=dict(s.logit_bias),
        stop_token_ids=tuple(s.stop_token_ids),
        bad_word_ids=tuple(tuple(word.ids) for word in s.bad_words),
        allowed_token_ids=tuple(s.allowed_token_ids) or None,
        constraint=Constraint("llguidance", s.grammar, "grammar") if s.grammar else None,
        **given,
    )


def _delta(delta: Delta, first_index: int) -> serving_pb2.GenerateResponse:
    return serving_pb2.GenerateResponse(
        delta=serving_pb2.TokenDelta(
            choice=delta.choice,
            first_index=first_index,
            token_ids=delta.token_ids,
            text=delta.text,
            logprobs=[codec.to_message(entry) for entry in delta.logprobs],
        )
    )


def _finished(delta: Delta) -> serving_pb2.GenerateResponse:
    if delta.usage is None or delta.timeline is None or delta.finish_reason is None:
        raise InvariantError("the last delta has no usage")
    t = delta.timeline
    return serving_pb2.GenerateResponse(
        finished=serving_pb2.Finished(
            choice=delta.choice,
            finish_reason=delta.finish_reason,
            stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
            prompt_tokens=delta.usage.prompt_tokens,
            completion_tokens=delta.usage.completion_tokens,
            cached_tokens=delta.usage.cached_tokens,
            stages=types_pb2.StageStamps(**{field.name: getattr(t, field.name) for field in fields(StageStamps)}),
            first_token_s=t.first_token_s,
            speculation=None if (s := delta.usage.speculation) is None else codec.to_message(s),
            prefill_worker=t.prefill_worker,
            decode_worker=t.decode_worker,
            spans=[serving_pb2.Span(**span._asdict()) for span in t.spans],
            split="" if t.split is None else t.split.reason,
        )
    )


def _reflection_v1(names: Iterable[str]) -> grpc.GenericRpcHandler:
    """Returns reflection under its final name, which newer tools request. It uses the v1alpha messages, the only ones
    that the library has: package names are not on the wire."""
    servicer = reflection.aio.ReflectionServicer(names)
    info = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": info})


def message_limit(max_body_bytes: int, max_model_len: int) -> int:
    """Returns the maximum bytes of a request: more for a model with a long context, whose prompts must fit."""
    return min(max_body_bytes, max(MAX_MESSAGE_BYTES, TOKEN_BYTES * max_model_len))


class PublicServer:
    """The public server with health: SERVING while both pools have a ready worker and the cluster is not draining."""

    def __init__(
        self,
        pipeline: Pipeline,
        translator: Translator,
        model: str,
        max_body_bytes: int,
        keys: ApiKeys | None = None,
        tls: grpc.ServerCredentials | None = None,
        strict_fields: bool = False,
        served: ServedModel | None = None,
    ) -> None:
        self._tls = tls
        limits = [
            ("grpc.max_receive_message_length", message_limit(max_body_bytes, translator.text.max_model_len)),
            ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
            ("grpc.max_connection_idle_ms", IDLE_CONNECTION_S * 1000),
            ("grpc.max_connection_age_ms", CONNECTION_AGE_S * 1000),
            ("grpc.max_connection_age_grace_ms", CONNECTION_AGE_S * 1000),
            ("grpc.max_allowed_incoming_connections", round(connection_limit(0) * GRPC)),
            SHARED_PORTS,
        ]
        options = list({**dict(SERVER_OPTIONS), **dict(limits)}.items())
        self._server = grpc.aio.server(interceptors=(FirstMessage(),), options=options)
        serving = Serving(pipeline, translator, model, keys or ApiKeys(), strict_fields)
        inference = Inference(pipeline, translator, served or ServedModel(model), keys or ApiKeys(), strict_fields)
        self._server.add_generic_rpc_handlers((serving, inference))
        services = dict.fromkeys(("", SERVICE, INFERENCE), lambda: pipeline.ready()[0])
        health_pb2_grpc.add_HealthServicer_to_server(health.Health(services), self._server)
        names = (SERVICE, INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._server.add_generic_rpc_handlers((_reflection_v1(names),))

    async def start(self, host: str, port: int, *, take_over: bool = False) -> int:
        """Starts the server and returns its port, on which with `take_over` another coordinator of this user may still
        listen. Raises StartupError if it cannot listen."""
        bound = open_port(self._server, host, port, "gRPC", "--grpc-port", self._tls, check=not take_over)
        await self._server.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
