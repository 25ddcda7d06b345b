"""`/v2`: the Open Inference Protocol over HTTP, with Triton's generate extension."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from baton.core.errors import InvalidRequest
from coordinator.http.body import BodyParser, BodyReader
from coordinator.http.errors import json_response
from coordinator.http.generation import ADAPTER, GenerationResponse, owned, time_limit_s
from coordinator.http.guard import CLIENT, IGNORED
from coordinator.http.openapi import ROUTE, add_route
from coordinator.inference.model import Generation, check_pieces, generation, submissions_of, text_generation
from coordinator.inference.render import InferRender, WholeAnswer
from coordinator.inference.schema import InferBody, infer_response, parse_generate, parse_infer
from coordinator.inference.served import CountingPipeline, ServedModel
from coordinator.inference.tensors import Tensor
from coordinator.pipeline import Pipeline
from coordinator.translate import Translator

_LENGTH = "inference-header-content-length"
_DIGITS = re.compile(r"[0-9]{1,12}", re.ASCII)


@dataclass(frozen=True, slots=True)
class InferenceRoutes:
    """`reader` and `parser` are those of the other bodies."""

    pipeline: Pipeline
    translator: Translator
    served: ServedModel
    reader: BodyReader
    parser: BodyParser
    strict_fields: bool

    @property
    def measured(self) -> CountingPipeline:
        return CountingPipeline(self.pipeline, self.served.statistics)

    def add_to(self, app: Starlette) -> None:
        of_model = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
        add_route(app, "GET", "/v2", self.server, "InferenceServer")
        add_route(app, "GET", "/v2/health/live", self.live, "text/plain")
        add_route(app, "GET", "/v2/health/ready", self.ready, "text/plain")
        add_route(app, "GET", "/v2/models/stats", self.statistics, "InferenceStatistics")
        add_route(app, "POST", "/v2/repository/index", self.repository_index, "InferenceRepository")
        for path in of_model:
            add_route(app, "GET", path, self.metadata, "InferenceModel")
            add_route(app, "GET", f"{path}/ready", self.model_ready, "text/plain")
            add_route(app, "GET", f"{path}/config", self.config, "InferenceConfig")
            add_route(app, "GET", f"{path}/stats", self.statistics, "InferenceStatistics")
            add_route(app, "POST", f"{path}/infer", self.infer, "InferenceResponse", InferBody)
            add_route(app, "POST", f"{path}/generate", self.generate, "GeneratedText", given="GenerateBody")
            events = f"{path}/generate_stream"
            add_route(app, "POST", events, self.generate_stream, "text/event-stream", given="GenerateBody")

    async def server(self) -> Response:
        return json_response(self.served.server())

    async def live(self) -> Response:
        return Response(media_type="text/plain")

    async def ready(self) -> Response:
        ready, reason = self.pipeline.ready()
        return Response(media_type="text/plain") if ready else json_response({"error": reason}, http=503)

    async def model_ready(self, name: str, version: str = "") -> Response:
        self.served.check(name, version)
        return await self.ready()

    async def metadata(self, name: str, version: str = "") -> Response:
        self.served.check(name, version)
        return json_response(self.served.metadata(name))

    async def config(self, name: str, version: str = "") -> Response:
        self.served.check(name, version)
        return json_response(self.served.config(name))

    async def statistics(self, name: str = "", version: str = "") -> Response:
        if name:
            self.served.check(name, version)
        return json_response(self.served.model_stats(name))

    async def repository_index(self) -> Response:
        return json_response(self.served.repository_index(*self.pipeline.ready()))

    async def infer(self, request: Request, name: str, version: str = "") -> Response:
        request.scope[ADAPTER] = self.served.check(name, version)
        self.measured.check_room(request.scope[CLIENT], time_limit_s(request))
        length = request.headers.get(_LENGTH)
        if length is not None and not _DIGITS.fullmatch(length):
            raise InvalidRequest("Inference-Header-Content-Length must be a number", param=_LENGTH)
        parse = partial(parse_infer, None if length is None else int(length), self.strict_fields)
        asked = await self.parser.parse(parse, await self.reader.read(request, undeclared=True))
        made = generation(asked.request)
        if made.stream:
            raise InvalidRequest("'stream' needs generate_stream, or ModelStreamInfer over gRPC", param="stream")

        def answer(outputs: Sequence[Tensor]) -> Any:
            return infer_response(name, asked.request.id, outputs, asked.binary)

        return await self._run(request, name, made, asked.request.id, answer, asked.ignored)

    async def generate(self, request: Request, name: str, version: str = "") -> Response:
        request.scope[ADAPTER] = self.served.check(name, version)
        self.measured.check_room(request.scope[CLIENT], time_limit_s(request))
        given = await self.parser.parse(parse_generate, await self.reader.read(request, undeclared=True))
        request_id, made = text_generation(given)
        if made.stream:
            raise InvalidRequest("'stream' needs generate_stream", param="stream")
        return await self._run(request, name, made, request_id)

    async def generate_stream(self, request: Request, name: str, version: str = "") -> Response:
        request.scope[ADAPTER] = self.served.check(name, version)
        self.measured.check_room(request.scope[CLIENT], time_limit_s(request))
        given = await self.parser.parse(parse_generate, await self.reader.read(request, undeclared=True))
        request_id, made = text_generation({"stream": True} | given)
        return await self._run(request, name, made, request_id, events=True)

    async def _run(
        self,
        request: Request,
        name: str,
        made: Generation,
        request_id: str,
        answer: WholeAnswer | None = None,
        ignored: Collection[str] = (),
        *,
        events: bool = False,
    ) -> Response:
        internal_id = f"infer-{secrets.token_hex(16)}"
        submissions, more = await submissions_of(self.translator, made, internal_id, strict=self.strict_fields)
        request.scope[IGNORED] = names = more.union(ignored)
        self.pipeline.ignored(request.scope[ROUTE], names)
        submissions = [owned(each, request) for each in submissions]
        if events:
            check_pieces(len(submissions), submissions[0].n)
        render = InferRender(name, request_id, made, submissions[0].n, answer)
        return GenerationResponse(self.measured, submissions, render, stream=events)
