"""`/v1/embeddings`, classify, score and rerank: requests that generate nothing, answered by the prefill pool alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from coordinator.http.generation import GenerationResponse, owned, unique_id
from coordinator.http.openapi import add_route
from coordinator.openai.pooling import (
    ClassifyBody,
    ClassifyRender,
    EmbeddingsBody,
    EmbeddingsRender,
    Ranking,
    RerankBody,
    ScoreBody,
    ScoreRender,
)
from coordinator.openai.render import Head
from coordinator.pipeline import Pipeline
from coordinator.pooled import to_classify, to_compare, to_embed
from coordinator.submission import Submission
from coordinator.translate import Translator


@dataclass(frozen=True, slots=True)
class PoolingRoutes:
    """`read_body` reads and checks a body, `make_head` makes the head of an answer: those of the other endpoints."""

    pipeline: Pipeline
    translator: Translator
    read_body: Callable[[Request, Any], Awaitable[Any]]
    make_head: Callable[[Request, Sequence[Submission]], Head]

    def add_to(self, app: Starlette) -> None:
        add_route(app, "POST", "/v1/embeddings", self.embeddings, "Embeddings", EmbeddingsBody)
        add_route(app, "POST", "/classify", self.classify, "Classes", ClassifyBody)
        for path in ("/score", "/v1/score"):
            add_route(app, "POST", path, self.score, "Scores", ScoreBody)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            add_route(app, "POST", path, self.rerank, "Ranking", RerankBody)

    async def embeddings(self, request: Request) -> Response:
        body: EmbeddingsBody = await self.read_body(request, EmbeddingsBody)
        submissions = await to_embed(
            self.translator, unique_id(request), body.input, body.options(), body.dimensions, param="input"
        )
        submissions = [owned(each, request) for each in submissions]
        normalize = self.translator.text.pooling.normalize
        render = EmbeddingsRender(self.make_head(request, submissions), body, normalize=normalize)
        return GenerationResponse(self.pipeline, submissions, render, stream=False)

    async def classify(self, request: Request) -> Response:
        body: ClassifyBody = await self.read_body(request, ClassifyBody)
        name, options = unique_id(request), body.options()
        submissions = await to_classify(self.translator, name, body.input, options, param="input")
        submissions = [owned(each, request) for each in submissions]
        head, model = self.make_head(request, submissions), self.translator.text.pooling
        render = ClassifyRender(head, model, activation=body.use_activation is not False)
        return GenerationResponse(self.pipeline, submissions, render, stream=False)

    async def score(self, request: Request) -> Response:
        body: ScoreBody = await self.read_body(request, ScoreBody)
        return await self._compared(request, body, body.text_1, body.text_2, ("text_1", "text_2"))

    async def rerank(self, request: Request) -> Response:
        body: RerankBody = await self.read_body(request, RerankBody)
        ranking = Ranking(body.top_n or 0, None if body.return_documents is False else body.documents)
        return await self._compared(request, body, [body.query], body.documents, ("query", "documents"), ranking)

    async def _compared(
        self,
        request: Request,
        body: ScoreBody | RerankBody,
        firsts: Sequence[str],
        seconds: Sequence[str],
        params: tuple[str, str],
        ranking: Ranking | None = None,
    ) -> Response:
        options, name = body.options(), unique_id(request)
        submissions, pairs = await to_compare(self.translator, name, firsts, seconds, options, params=params)
        submissions = [owned(each, request) for each in submissions]
        head, activation = self.make_head(request, submissions), body.use_activation is not False
        render = ScoreRender(head, pairs, activation=activation, ranking=ranking)
        return GenerationResponse(self.pipeline, submissions, render, stream=False)
