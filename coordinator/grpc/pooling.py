"""Serving.Embed, Classify and Score: requests that generate nothing, over the same submissions as HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.core.errors import InvalidRequest
from baton.core.sampling_limits import check_count
from baton.runtime.event_loop import off_loop
from baton.v1 import serving_pb2
from coordinator.grpc.calls import internal_id, sent_with
from coordinator.pipeline import Pipeline, generate_all
from coordinator.policy.quotas import Client
from coordinator.pooled import MAX_INPUTS, classify, to_classify, to_compare, to_embed
from coordinator.submission import Delta, Submission, is_large
from coordinator.text.pooling import vector_of
from coordinator.translate import PoolOptions, Text, Translator


async def embed(
    pipeline: Pipeline,
    translator: Translator,
    client: Client,
    adapter: str,
    name: str,
    request: serving_pb2.EmbedRequest,
    context: grpc.aio.ServicerContext,
) -> serving_pb2.EmbedResponse:
    """Returns the embeddings of a request named `name`; `adapter` may be empty. Raises BatonError, which names the
    field."""
    texts = _texts(request.inputs)
    dimensions = request.dimensions if request.HasField("dimensions") else None
    submissions = await to_embed(
        translator, internal_id(name), texts, _options(request.options, context), dimensions, param="inputs"
    )
    answers = await _answers(pipeline, client, adapter, submissions, context)
    normalize = request.normalize if request.HasField("normalize") else translator.text.pooling.normalize

    def response() -> serving_pb2.EmbedResponse:
        vectors = (vector_of(each.pooled, dimensions=dimensions, normalize=normalize) for each in answers)
        embeddings = [serving_pb2.Embedding(values=vector) for vector in vectors]
        return serving_pb2.EmbedResponse(embeddings=embeddings, **_usage(answers))

    embedded: serving_pb2.EmbedResponse = await off_loop(is_large(answers), response)
    return embedded


async def classified(
    pipeline: Pipeline,
    translator: Translator,
    client: Client,
    adapter: str,
    name: str,
    request: serving_pb2.ClassifyRequest,
    context: grpc.aio.ServicerContext,
) -> serving_pb2.ClassifyResponse:
    """Returns the labels of the texts of a request named `name`. Raises BatonError, which names the field."""
    texts, options = _texts(request.inputs), _options(request.options, context)
    submissions = await to_classify(translator, internal_id(name), texts, options, param="inputs")
    answers = await _answers(pipeline, client, adapter, submissions, context)
    activation = request.use_activation or not request.HasField("use_activation")
    made = [classify(translator.text.pooling, each.pooled, activation=activation) for each in answers]
    shown = [serving_pb2.Classification(label=each.label, probs=each.probs) for each in made]
    return serving_pb2.ClassifyResponse(classifications=shown, **_usage(answers))


async def score(
    pipeline: Pipeline,
    translator: Translator,
    client: Client,
    adapter: str,
    name: str,
    request: serving_pb2.ScoreRequest,
    context: grpc.aio.ServicerContext,
) -> serving_pb2.ScoreResponse:
    """Returns the scores of a request named `name`. Raises BatonError, which names the field."""
    for field in ("firsts", "seconds"):
        check_count(field, len(getattr(request, field)), MAX_INPUTS)
    options, texts = _options(request.options, context), (list(request.firsts), list(request.seconds))
    submissions, pairs = await to_compare(translator, internal_id(name), *texts, options, params=("firsts", "seconds"))
    answers = await _answers(pipeline, client, adapter, submissions, context)
    activation = request.use_activation or not request.HasField("use_activation")

    def scores() -> list[float]:
        return pairs.scores([each.pooled for each in answers], activation=activation)

    made: list[float] = await off_loop(is_large(answers), scores)
    return serving_pb2.ScoreResponse(scores=made, **_usage(answers))


def _texts(inputs: Sequence[serving_pb2.EmbedInput]) -> list[Text]:
    check_count("inputs", len(inputs), MAX_INPUTS)
    if not inputs:
        raise InvalidRequest("inputs is empty", param="inputs")
    return [_text(each) for each in inputs]


def _text(given: serving_pb2.EmbedInput) -> Text:
    match given.WhichOneof("input"):
        case "text":
            return given.text
        case "token_ids":
            return given.token_ids.ids
        case _:
            raise InvalidRequest("an input needs one of text and token_ids", param="inputs")


def _options(given: serving_pb2.PoolingOptions, context: grpc.aio.ServicerContext) -> PoolOptions:
    return PoolOptions(
        truncate=given.truncate_prompt_tokens if given.HasField("truncate_prompt_tokens") else None,
        add_special_tokens=given.add_special_tokens or not given.HasField("add_special_tokens"),
        priority=given.priority,
        cache_salt=given.cache_salt or None,
        deadline_s=context.time_remaining(),
    )


async def _answers(
    pipeline: Pipeline,
    client: Client,
    adapter: str,
    submissions: Sequence[Submission],
    context: grpc.aio.ServicerContext,
) -> list[Delta]:
    """Returns the delta of each submission, in their order."""
    sent = sent_with(context)
    answers: dict[int, Delta] = {}
    owned = [each.of(client, *sent, adapter=adapter) for each in submissions]
    async with aclosing(generate_all(pipeline, owned)) as deltas:
        async for delta in deltas:
            answers[delta.choice] = delta
    return [answers[index] for index in range(len(submissions))]


def _usage(answers: Sequence[Delta]) -> dict[str, Any]:
    usages = [each.usage for each in answers if each.usage is not None]
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
    }
