"""The Open Inference Protocol over gRPC: `inference.GRPCInferenceService`, as Triton's clients call it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from baton.core.errors import BatonError, DeadlineExceeded, InvalidRequest, Unauthenticated
from baton.runtime import status
from baton.runtime.first_message import parsed, unknown_fields
from baton.runtime.ignored_fields import as_header
from baton.v1 import inference_pb2 as pb
from coordinator.api_keys import ApiKeys
from coordinator.grpc.calls import abort, refuse, sent_value, sent_with, write
from coordinator.inference import model as oip
from coordinator.inference.model import submissions_of
from coordinator.inference.served import VERSION, CountingPipeline, ServedModel
from coordinator.inference.tensors import Tensor, checked, packed, unpacked
from coordinator.pipeline import Pipeline, generate_all
from coordinator.policy.quotas import Client
from coordinator.submission import Delta, Submission
from coordinator.translate import Translator

log = logging.getLogger("baton.grpc")
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
OPEN = ("ServerLive", "ServerReady", "ModelReady")
"""Methods that need no key: they are for probes."""
IDLE_S = 300.0
"""How long a stream without a running request may send no further message."""
MAX_STREAMED = 64
"""Requests of one stream that run at the same time; the next is read when one of them has ended."""
MAX_INPUTS = 64
FINAL = "triton_final_response"
_CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_M = TypeVar("_M", bound=Message)


class Inference(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The service. A call without a valid key, unless it is a probe, ends before its message is read."""

    def __init__(
        self,
        pipeline: Pipeline,
        translator: Translator,
        served: ServedModel,
        keys: ApiKeys,
        strict_fields: bool = False,
    ) -> None:
        self._pipeline, self._translator, self._served = pipeline, translator, served
        self._keys, self._strict = keys, strict_fields
        self._measured = CountingPipeline(pipeline, served.statistics)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Returns the handler of one call; None for other services and for extensions that are not served."""
        of, _, method = handler_call_details.method[1:].partition("/")
        if of != SERVICE:
            return None
        client = Client()
        if method not in OPEN:
            try:
                client = self._keys.client(sent_value(handler_call_details.invocation_metadata, "authorization"))
            except Unauthenticated as refused:
                return grpc.stream_unary_rpc_method_handler(partial(refuse, refused))
        serialize = {"response_serializer": operator.methodcaller("SerializeToString")}
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, client), **serialize)
        if method == "ModelInfer":
            answer = partial(self._unary, pb.ModelInferRequest, partial(self._infer, client))
            return grpc.unary_unary_rpc_method_handler(answer, **serialize)
        if method in _UNARY:
            request, make = _UNARY[method]
            return grpc.unary_unary_rpc_method_handler(
                partial(self._unary, request, partial(_immediately, partial(make, self))), **serialize
            )
        return None

    # One answer to one message.

    async def _unary(
        self, kind: type[_M], answer: Callable[[_M, grpc.aio.ServicerContext], Any], content: bytes, context: Any
    ) -> Any:
        try:
            return await answer(parsed(kind, content), context)
        except Exception as error:
            _note(error)
            del content
            await abort(error, context)

    async def _infer(
        self, client: Client, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        self._measured.check_room(client, context.time_remaining())
        made = oip.generation(_infer_request(request))
        if made.stream:
            raise InvalidRequest("'stream' needs ModelStreamInfer", param="stream")
        submissions = await self._submissions(client, request, made, context)
        answers = await _whole(self._deltas(submissions), submissions)
        return self._response(request, oip.outputs_of(made, answers, submissions[0].n))

    # Any number of answers to each of several messages.

    async def _stream(self, client: Client, contents: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        running: set[asyncio.Task[None]] = set()
        writing = asyncio.Lock()  # grpc refuses two writes at the same time

        async def send(message: pb.ModelStreamInferResponse) -> None:
            async with writing:
                await write(context, message)

        try:
            async with aclosing(_messages(contents, running)) as messages:
                async for content in messages:
                    if len(running) >= MAX_STREAMED:
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    task = asyncio.create_task(self._streamed(client, content, context, send))
                    running.add(task)
                    task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running)
        except (InvalidRequest, DeadlineExceeded) as error:  # bytes that are no message; silence
            await abort(error, context)
        finally:
            for task in running:
                task.cancel()

    async def _streamed(
        self,
        client: Client,
        content: bytes,
        context: grpc.aio.ServicerContext,
        send: Callable[[pb.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        """Answers one request of a stream. An error is a message, as in Triton: it does not end the stream."""
        request = pb.ModelInferRequest()
        try:
            request = parsed(pb.ModelInferRequest, content)
            self._measured.check_room(client, context.time_remaining())
            made = oip.generation(_infer_request(request))
            submissions = await self._submissions(client, request, made, context)
            if made.stream is False:
                answers = await _whole(self._deltas(submissions), submissions)
                response = self._response(request, oip.outputs_of(made, answers, submissions[0].n), final=True)
                await send(pb.ModelStreamInferResponse(infer_response=response))
            else:
                oip.check_pieces(len(submissions), submissions[0].n)
                made = replace(made, with_prompt=False)
                left = len(submissions) * submissions[0].n
                async with aclosing(self._deltas(submissions)) as deltas:
                    async for delta in deltas:
                        left -= delta.finish_reason is not None
                        if not delta.text and delta.finish_reason is None:
                            continue
                        response = self._response(request, oip.piece_of(made, delta), final=left == 0)
                        await send(pb.ModelStreamInferResponse(infer_response=response))
        except Exception as error:
            _note(error)
            message = f"{status.public_code(error)}: {status.public_message(error)}"
            response = pb.ModelInferResponse(
                model_name=request.model_name[:128], model_version=VERSION, id=request.id[:128]
            )
            response.parameters[FINAL].bool_param = True
            with contextlib.suppress(BatonError, grpc.RpcError):
                await send(pb.ModelStreamInferResponse(error_message=message, infer_response=response))

    # What both share.

    async def _submissions(
        self,
        client: Client,
        request: pb.ModelInferRequest,
        made: oip.Generation,
        context: grpc.aio.ServicerContext,
    ) -> list[Submission]:
        adapter, sent = self._served.check(request.model_name, request.model_version), sent_with(context)
        submissions, ignored = await submissions_of(
            self._translator,
            made,
            f"infer-{secrets.token_hex(16)}",
            strict=self._strict,
            deadline_s=context.time_remaining(),
        )
        names = ignored | unknown_fields(request)
        if names:
            self._pipeline.ignored(f"/{SERVICE}", names)
            names |= set(filter(None, sent_value(context.trailing_metadata(), "x-ignored-fields").split(", ")))
            with contextlib.suppress(grpc.aio.UsageError):  # a stream has sent its metadata
                context.set_trailing_metadata((("x-ignored-fields", as_header(names)),))
        return [each.of(client, *sent, adapter=adapter) for each in submissions]

    def _deltas(self, submissions: list[Submission]) -> AsyncGenerator[Delta, None]:
        if len(submissions) == 1:
            return self._measured.generate(submissions[0])
        return generate_all(self._measured, submissions)

    def _response(
        self, request: pb.ModelInferRequest, outputs: Iterable[Tensor], *, final: bool | None = None
    ) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        for tensor in outputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(packed(tensor))
        if final is not None:
            response.parameters[FINAL].bool_param = final
        return response

    # About the server and its model.

    def _live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    def _ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._pipeline.ready()[0])

    def _model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        self._served.check(request.name, request.version)
        return pb.ModelReadyResponse(ready=self._pipeline.ready()[0])

    def _server(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return ParseDict(self._served.server(), pb.ServerMetadataResponse())

    def _metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        self._served.check(request.name, request.version)
        return ParseDict(self._served.metadata(request.name), pb.ModelMetadataResponse())

    def _config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        self._served.check(request.name, request.version)
        return ParseDict({"config": self._served.config(request.name)}, pb.ModelConfigResponse())

    def _statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        if request.name:
            self._served.check(request.name, request.version)
        return ParseDict(
            self._served.model_stats(request.name), pb.ModelStatisticsResponse(), ignore_unknown_fields=True
        )

    def _index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        models = self._served.repository_index(*self._pipeline.ready())
        return ParseDict({"models": models}, pb.RepositoryIndexResponse())


_UNARY: dict[str, tuple[type[Message], Callable[[Inference, Any], Message]]] = {
    "ServerLive": (pb.ServerLiveRequest, Inference._live),
    "ServerReady": (pb.ServerReadyRequest, Inference._ready),
    "ModelReady": (pb.ModelReadyRequest, Inference._model_ready),
    "ServerMetadata": (pb.ServerMetadataRequest, Inference._server),
    "ModelMetadata": (pb.ModelMetadataRequest, Inference._metadata),
    "ModelConfig": (pb.ModelConfigRequest, Inference._config),
    "ModelStatistics": (pb.ModelStatisticsRequest, Inference._statistics),
    "RepositoryIndex": (pb.RepositoryIndexRequest, Inference._index),
}


async def _immediately(make: Callable[[Any], Message], request: Any, context: grpc.aio.ServicerContext) -> Message:
    return make(request)


async def _messages(
    contents: AsyncIterator[bytes], running: Collection[asyncio.Task[None]]
) -> AsyncGenerator[bytes, None]:
    """Yields the messages of a stream. Raises DeadlineExceeded if none arrives for IDLE_S while no request runs."""
    while True:
        # Not cancelled after the limit: gRPC has begun to read, and stops with the call.
        reading = asyncio.ensure_future(anext(contents, None))
        while not reading.done():
            ended, _ = await asyncio.wait((reading, *running), timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            if not ended and not running:
                reading.add_done_callback(lambda read: read.cancelled() or read.exception())
                raise DeadlineExceeded(f"no message of the stream arrived within {IDLE_S:g} s")
        content = reading.result()
        if content is None:
            return
        yield content


async def _whole(deltas: AsyncGenerator[Delta, None], submissions: list[Submission]) -> list[Delta]:
    """Returns one merged delta per choice: its last one, with its whole text."""
    texts = [""] * (len(submissions) * submissions[0].n)
    last: dict[int, Delta] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            texts[delta.choice] += delta.text
            if delta.finish_reason is not None:
                last[delta.choice] = delta
    return [last[choice]._replace(text=text) for choice, text in enumerate(texts)]


def _infer_request(request: pb.ModelInferRequest) -> oip.InferRequest:
    """Raises InvalidRequest that names the input at fault."""
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidRequest(f"at most {MAX_INPUTS} inputs, not {len(request.inputs)}", param="inputs")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        reason = f"{len(raw)} entries for {len(request.inputs)} inputs"
        raise InvalidRequest(reason, param="raw_input_contents")
    inputs = []
    for number, given in enumerate(request.inputs):
        shape = tuple(given.shape)
        if raw:
            inputs.append(unpacked(given.name, given.datatype, shape, raw[number]))
            continue
        contents = _CONTENTS.get(given.datatype)
        values = getattr(given.contents, contents) if contents else ()
        inputs.append(checked(given.name, given.datatype, shape, list(values)))
    parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
    return oip.InferRequest(request.id, tuple(inputs), parameters, tuple(output.name for output in request.outputs))


def _value(parameter: pb.InferParameter) -> Any:
    which = parameter.WhichOneof("parameter_choice")
    return None if which is None else getattr(parameter, which)


def _note(error: Exception) -> None:
    if status.row(error).hide:
        log.error("internal error: %s", type(error).__name__, exc_info=error)
